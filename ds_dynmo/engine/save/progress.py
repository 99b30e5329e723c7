"""Save and restore the counters of an engine, what it has measured, and its random number generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.deepspeed.checkpointing import deepspeeds_tracker
from ds_dynmo.engine.deepspeed.counters import (
    micro_batch_counters,
    set_micro_batch_counters,
)
from ds_dynmo.engine.run.random_streams import LayerStreams


class EngineProgress:
    """The counters of an engine, what it has measured and its seed, the same on every rank.

    Args:
        streams: random numbers per layer; None: layers use the rank's generators.
        inform: logs an action on rank 0.

    Attributes:
        run: identifies the run in its checkpoints; a run that is resumed keeps it.
    """

    def __init__(
        self,
        engine: Any,
        rebalancer: Rebalancer,
        streams: LayerStreams | None,
        inform: Callable[[str], None],
        run: str,
    ) -> None:
        self._engine, self._rebalancer, self._streams, self._inform = engine, rebalancer, streams, inform
        self.run = run

    def counters(self) -> dict[str, Any]:
        """Return the counters that DeepSpeed's checkpoints lack, as plain JSON, for a checkpoint."""
        rebalancer = self._rebalancer
        return {
            **micro_batch_counters(self._engine),
            "run": self.run,
            "random_seed": None if self._streams is None else self._streams.seed,
            "last_move_step": rebalancer.last_move_step,
            "controller": rebalancer.cycle.saved(),
            "experience": rebalancer.decider.cost_model.state_dict(),
        }

    def restore_counters(self, saved: dict[str, Any], *, same_placement: bool) -> None:
        """Restore :meth:`counters`; those of decisions, and what was learnt for them, only at the saved placement."""
        rebalancer = self._rebalancer
        set_micro_batch_counters(self._engine, saved)
        self.run = saved.get("run", self.run)
        seed = saved.get("random_seed")
        if self._streams is not None and not self._streams.seed_of_user and seed is not None:
            self._streams.seed = seed
            self._inform(f"DynMo: random numbers of layers are of seed {seed}, the checkpoint's")
        if same_placement:
            rebalancer.last_move_step = saved["last_move_step"]
            rebalancer.resume(saved["controller"])
            rebalancer.decider.cost_model.load_state_dict(saved["experience"])
        else:
            rebalancer.decider.cost_model.model_changed()
            rebalancer.decider.cost_model.first_seconds = saved["experience"]["first_seconds"]


def random_states() -> dict[str, Any]:
    """Return the states of this rank's generators, in classes that :func:`safe_load` allows."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    version, words, next_gauss = random.getstate()
    accelerator = get_accelerator()
    return {
        "torch": torch.get_rng_state(),
        "accelerator": None if accelerator.device_name() == "cpu" else accelerator.get_rng_state(),
        "checkpointing": deepspeeds_tracker().get_states(),
        "python": (version, torch.tensor(words, device="cpu"), next_gauss),  # as numbers they are slow to check
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
    }


def restore_random_states(saved: dict[str, Any]) -> None:
    """Restore :func:`random_states`."""
    torch.set_rng_state(saved["torch"])
    if saved["accelerator"] is not None and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(saved["accelerator"])
    if saved["checkpointing"]:
        deepspeeds_tracker().set_states(saved["checkpointing"])
    version, words, next_gauss = saved["python"]
    random.setstate((version, tuple(words.tolist()), next_gauss))
    name, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
