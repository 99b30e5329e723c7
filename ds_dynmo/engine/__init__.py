"""Measure, decide, migrate, train: the pipeline engine."""

from ds_dynmo.engine.engine import DynMoPipelineEngine
from ds_dynmo.engine.initialization import initialize

__all__ = ["DynMoPipelineEngine", "initialize"]
