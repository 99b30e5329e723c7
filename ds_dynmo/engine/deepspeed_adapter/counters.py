"""What DeepSpeed's engine counts, beside ``global_steps`` and ``global_samples``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHARED = (  # alike on every rank
    "global_steps",
    "global_samples",
    "skipped_steps",
    "_global_grad_norm",
    "agg_train_loss",
    "agg_additional_losses",
)


def shared_counters(engine: Any) -> dict[str, Any]:
    """What every rank counts alike, for one that was away."""
    return {name: getattr(engine, name) for name in _SHARED}


def set_shared_counters(engine: Any, counters: Mapping[str, Any]) -> None:
    """Put back :func:`shared_counters` of another rank."""
    for name in _SHARED:
        setattr(engine, name, counters[name])


def micro_batch_counters(engine: Any) -> dict[str, int]:
    """What seeds layers (``seed_layers``), and what DeepSpeed's checkpoints lack."""
    return {"micro_steps": engine.micro_steps, "micro_offset": engine.module.micro_offset}


def set_micro_batch_counters(engine: Any, counters: Mapping[str, Any]) -> None:
    """Put back :func:`micro_batch_counters`."""
    engine.micro_steps = counters["micro_steps"]
    engine.module.micro_offset = counters["micro_offset"]
