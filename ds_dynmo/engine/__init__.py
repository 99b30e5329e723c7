"""Measure, decide, migrate, train: the pipeline engine."""

from ds_dynmo.engine.engine import DynMoPipelineEngine
from ds_dynmo.engine.initialize import initialize

__all__ = ["DynMoPipelineEngine", "initialize"]
