"""The counters of DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline


class TrainingCounters:
    """The present counters of a DeepSpeed engine: steps, samples and micro-batches."""

    def __init__(self, engine: DeepSpeedPipeline) -> None:
        self._engine = engine

    @property
    def steps(self) -> int:
        """Batches trained on."""
        return self._engine.global_steps

    @property
    def samples(self) -> int:
        """Samples trained on."""
        return self._engine.global_samples

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch, on each rank."""
        return self._engine.micro_batches


def micro_batch_counters(engine: Any) -> dict[str, int]:
    """Collect the counters of micro-batches, which seed layers (``seed_layers``) and which DeepSpeed does not save."""
    return {"micro_steps": engine.micro_steps, "micro_offset": engine.module.micro_offset}


def set_micro_batch_counters(engine: Any, counters: Mapping[str, Any]) -> None:
    """Set the counters to :func:`micro_batch_counters` of a checkpoint."""
    engine.micro_steps = counters["micro_steps"]
    engine.module.micro_offset = counters["micro_offset"]
