"""Report what the engine does: log lines, JSON lines, DeepSpeed's monitors."""

from ds_dynmo.engine.reporting.reporter import Reporter

__all__ = ["Reporter"]
