"""Say what was decided: log lines, JSON lines, monitors of DeepSpeed."""
