"""Layer freezing of a prefix of the model by a schedule, or by AutoFreeze's criterion (paper, section 2).

Egeria's criterion is in :mod:`ds_dynmo.models.freezing.egeria`.

Every rank runs the same controller on the same numbers, so that all agree on the frozen prefix: with a schedule without
communication; AutoFreeze sums gradient magnitudes over all ranks first. Freezing a block freezes the blocks and other
layers before it (the embedding, learned positions) too; the final norm and the head are never frozen. A tied embedding
is the head's weight too: freezing it freezes every copy, the head's included. A model that freezes is therefore refused
unless it is untied.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_dynmo.models.case import RunSizes
from ds_dynmo.models.freezing.config import FreezingConfig
from ds_dynmo.models.freezing.frozen_prefix import FreezingCase

__all__ = [
    "Freezing",
    "FreezingController",
    "auto_freeze",
    "gradient_change",
    "scheduled_blocks",
]


def scheduled_blocks(schedule: Sequence[tuple[float, int]], step: int, total_steps: int) -> int:
    """Count the blocks that ``schedule`` has frozen in step ``step``, counted from 0, of ``total_steps``.

    >>> [scheduled_blocks([(0.2, 2), (0.6, 4)], step, total_steps=10) for step in range(10)]
    [0, 0, 2, 2, 2, 2, 4, 4, 4, 4]
    """
    frozen = 0
    for fraction, blocks in schedule:
        if step >= round(fraction * total_steps):
            frozen = blocks
    return frozen


def gradient_change(previous: float, current: float) -> float:
    """Compute AutoFreeze's eta, ``|previous - current| / previous``; infinite where that is not defined."""
    if not (math.isfinite(previous) and math.isfinite(current)) or previous == 0:
        return math.inf
    return abs(previous - current) / previous


def auto_freeze(previous: Sequence[float], current: Sequence[float], frozen_blocks: int) -> int:
    """Decide as AutoFreeze how many blocks are frozen from now on, never fewer than ``frozen_blocks``.

    The prefix grows up to the first active block whose gradient changed by the median of the active blocks'
    changes or more. One such block always exists: the last block is never frozen.

    Args:
        previous, current: per block, the gradients' magnitudes in the last interval but one, and the last, on average
            over its batches.
    """
    changes = [gradient_change(*pair) for pair in zip(previous[frozen_blocks:], current[frozen_blocks:], strict=True)]
    median = statistics.median(changes)
    return frozen_blocks + next(block for block, change in enumerate(changes) if change >= median)


class FreezingController:
    """Decides how many layers the frozen prefix of a model has.

    A block is frozen whole, also where it is two layers (``layers_per_block``). Before each batch, call
    ``set_frozen_prefix(module, controller.frozen_prefix(step))`` where that number changed. With :attr:`automatic`,
    call :meth:`add_gradients` between backward and optimizer step of every batch, and :meth:`evaluate` after it.

    """

    def __init__(self, config: FreezingConfig, sizes: RunSizes) -> None:
        self._config = config
        self._blocks = sizes.blocks
        self._layers_per_block = sizes.layers_per_block
        self._total_steps = sizes.total_steps
        self._frozen_blocks = 0
        self._previous: list[float] | None = None
        # This rank's share. A layer that moves leaves its sums here; the sum over all ranks has them.
        self._sums = torch.zeros(sizes.num_layers, dtype=torch.float64)
        self._batches = 0  # in the sums

    @property
    def automatic(self) -> bool:
        """Whether this controller needs gradients."""
        return self._config.automatic is not None

    def frozen_prefix(self, step: int) -> int:
        """Count the layers of the layer list that are frozen in step ``step``, counted from 0."""
        if self._config.schedule is not None:
            blocks = scheduled_blocks(self._config.schedule, step, self._total_steps)
        else:
            blocks = self._frozen_blocks
        return self._blocks.start + blocks * self._layers_per_block if blocks else 0

    def add_gradients(self, magnitudes: torch.Tensor) -> None:
        """Add this rank's share of the sums of gradient magnitudes of one batch, fp64 ``[num_layers]``."""
        self._sums += magnitudes
        self._batches += 1

    def evaluate(self, steps_done: int, sum_over_world: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Decide anew, if an interval ends after ``steps_done`` steps. Collective.

        An interval in which the optimizer skipped every step, as fp16 overflowed, is passed over.

        Args:
            sum_over_world: adds a CPU float64 ``[num_layers]`` tensor over all ranks, collectively.

        Raises:
            RuntimeError: no active block had any gradient.
        """
        automatic = self._config.automatic
        is_end = automatic is not None and steps_done % max(1, round(automatic.interval * self._total_steps)) == 0
        if automatic is None or not is_end or not self._batches:
            return
        # As fp32 numbers: in what order fp64 ones were added depends on where layers and their shards were.
        of_blocks = sum_over_world(self._sums)[self._blocks.start : self._blocks.stop]
        means = of_blocks.view(-1, self._layers_per_block).sum(dim=1).div(self._batches).float().tolist()
        self._sums, self._batches = torch.zeros_like(self._sums), 0
        if not any(means[self._frozen_blocks :]):
            raise RuntimeError(
                f"automatic freezing saw no gradient in blocks {self._frozen_blocks} to {len(means) - 1} "
                f"up to step {steps_done}"
            )
        if self._previous is not None and steps_done >= round(automatic.start * self._total_steps):
            self._frozen_blocks = auto_freeze(self._previous, means, self._frozen_blocks)
        self._previous = means

    def state_dict(self, sum_over_world: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Return the controller's state, as plain JSON values, the same on every rank. Collective."""
        return {
            "frozen_blocks": self._frozen_blocks,
            "previous": self._previous,
            "sums": sum_over_world(self._sums).tolist(),
            "batches": self._batches,
        }

    def load_state_dict(self, state: dict[str, Any], *, first_rank: bool) -> None:
        """Load what :meth:`state_dict` returned; the first rank takes the sums as its share."""
        self._frozen_blocks = state["frozen_blocks"]
        self._previous = state["previous"]
        self._batches = state["batches"]
        self._sums.zero_()
        if first_rank:
            self._sums += torch.tensor(state["sums"], dtype=torch.float64)


class Freezing(FreezingCase):
    """Connects a :class:`FreezingController` to the engine."""

    def __init__(self, config: FreezingConfig, engine: Any, sizes: RunSizes) -> None:
        super().__init__(engine, sizes)
        self._controller = FreezingController(config, sizes)
        self._magnitudes: tuple[torch.Tensor, int] | None = None  # of this batch, and the steps skipped before it
        if self._controller.automatic:
            engine.before_step(self._measure)
            engine.before_release(lambda: self.load_state_dict(self.state_dict()))  # on the first rank

    def _measure(self) -> None:
        self._magnitudes = self.engine.gradient_magnitudes(), self.engine.skipped_steps

    def before_batch(self, step: int) -> None:
        """Freeze the controller's prefix, and call ``model_changed`` if it is new."""
        self._freeze(self._controller.frozen_prefix(step))

    def after_batch(self, steps_done: int) -> None:
        """Let the controller decide."""
        self._add_gradients()
        self._controller.evaluate(steps_done, self.engine.sum_over_world)

    def _add_gradients(self) -> None:
        """Add the measured gradients to the controller's, unless the optimizer skipped the step."""
        if self._magnitudes is not None:
            magnitudes, skipped = self._magnitudes
            if self.engine.skipped_steps == skipped:  # else they overflowed (fp16)
                self._controller.add_gradients(magnitudes)
            self._magnitudes = None

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state. Collective."""
        self._add_gradients()
        return self._controller.state_dict(self.engine.sum_over_world)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the controller's state."""
        self._loaded()
        self._controller.load_state_dict(state, first_rank=self.engine.global_rank == 0)
