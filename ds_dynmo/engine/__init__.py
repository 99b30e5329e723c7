"""Measure, decide, migrate, train: the pipeline engine."""

from ds_dynmo.engine.deepspeed_adapter.shm_operator import skip_shm_operator
from ds_dynmo.engine.engine import DynMoPipelineEngine
from ds_dynmo.engine.initialization import initialize

__all__ = ["DynMoPipelineEngine", "initialize", "skip_shm_operator"]
