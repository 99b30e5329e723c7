"""What an engine counts, and its random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing


def counters_of(engine: Any) -> dict[str, Any]:
    """What DeepSpeed's files lack, the same on every rank, as plain JSON."""
    return {
        "micro_steps": engine.micro_steps,
        "micro_offset": engine.module.micro_offset,
        "last_move_step": engine._last_move_step,
        "controller": engine._controller.state_dict(),
        "experience": engine._cost_model.state_dict(),
    }


def restore_counters(engine: Any, saved: dict[str, Any], *, same_partition: bool) -> None:
    """Put back :func:`counters_of`; when to decide, and what was learnt for it, at the saved partition alone."""
    engine.micro_steps = saved["micro_steps"]
    engine.module.micro_offset = saved["micro_offset"]
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
        "checkpointing": ds_checkpointing.get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
    }


def restore_random_states(saved: dict[str, Any]) -> None:
    """Put back :func:`random_states`."""
    torch.set_rng_state(saved["torch"])
    if saved["accelerator"] is not None and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(saved["accelerator"])
    if saved["checkpointing"]:
        ds_checkpointing.get_cuda_rng_tracker().set_states(saved["checkpointing"])
    random.setstate(saved["python"])
    name, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
