"""What an engine counts, and its random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.deepspeed_adapter.checkpointing import deepspeeds_tracker
from ds_dynmo.engine.deepspeed_adapter.counters import micro_batch_counters, set_micro_batch_counters


def counters_of(engine: Any) -> dict[str, Any]:
    """What DeepSpeed's files lack, the same on every rank, as plain JSON."""
    return {
        **micro_batch_counters(engine),
        "last_move_step": engine._last_move_step,
        "controller": engine._controller.state_dict(),
        "experience": engine._cost_model.state_dict(),
    }


def restore_counters(engine: Any, saved: dict[str, Any], *, same_partition: bool) -> None:
    """Put back :func:`counters_of`; when to decide, and what was learnt for it, at the saved partition alone."""
    set_micro_batch_counters(engine, saved)
    if same_partition:
        engine._last_move_step = saved["last_move_step"]
        engine._controller.load_state_dict(saved["controller"])
        engine._cost_model.load_state_dict(saved["experience"])
    else:
        engine._cost_model.model_changed()
        engine._cost_model.first_seconds = saved["experience"].get("first_seconds")


def random_states() -> dict[str, Any]:
    """The states of this rank's generators, in classes that can be loaded safely."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    accelerator = get_accelerator()
    return {
        "torch": torch.get_rng_state(),
        "accelerator": None if accelerator.device_name() == "cpu" else accelerator.get_rng_state(),
        "checkpointing": deepspeeds_tracker().get_states(),
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
    }


def restore_random_states(saved: dict[str, Any]) -> None:
    """Put back :func:`random_states`."""
    torch.set_rng_state(saved["torch"])
    if saved["accelerator"] is not None and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(saved["accelerator"])
    if saved["checkpointing"]:
        deepspeeds_tracker().set_states(saved["checkpointing"])
    random.setstate(saved["python"])
    name, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
