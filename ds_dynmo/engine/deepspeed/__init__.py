"""What this project needs of DeepSpeed beyond its public API, and the mends of what differs there."""
