"""The counters of DeepSpeed's engine, for ranks that were away and for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_dynmo.engine.deepspeed.loss_scale import loss_scale_state, set_loss_scale_state
from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline

_SHARED = (  # alike on every rank
    "global_steps",
    "global_samples",
    "skipped_steps",
    "_global_grad_norm",
    "agg_train_loss",
    "agg_additional_losses",
)


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


def shared_counters(engine: Any) -> dict[str, Any]:
    """Collect the counters that are equal on every rank, for a rank that was away."""
    return {**{name: getattr(engine, name) for name in _SHARED}, "loss_scale": loss_scale_state(engine.optimizer)}


def set_shared_counters(engine: Any, counters: Mapping[str, Any]) -> None:
    """Set the counters to another rank's :func:`shared_counters`."""
    for name in _SHARED:
        setattr(engine, name, counters[name])
    set_loss_scale_state(engine.optimizer, counters["loss_scale"])


def micro_batch_counters(engine: Any) -> dict[str, int]:
    """Collect the counters of micro-batches, which seed layers (``seed_layers``) and which DeepSpeed does not save."""
    return {"micro_steps": engine.micro_steps, "micro_offset": engine.module.micro_offset}


def set_micro_batch_counters(engine: Any, counters: Mapping[str, Any]) -> None:
    """Set the counters to :func:`micro_batch_counters` of a checkpoint."""
    engine.micro_steps = counters["micro_steps"]
    engine.module.micro_offset = counters["micro_offset"]
