"""Layer freezing of the model's front: by a schedule, or by AutoFreeze's criterion (paper, section 2, layer freezing).

Egeria's criterion is in :mod:`ds_dynmo.models.freezing.egeria`.

Every rank runs the same controller on the same numbers, so that all agree on the frozen prefix without communication.
Freezing a block freezes the blocks before it and what is before the blocks (the embedding, learned positions) too; the
final norm and the head are never frozen. A tied embedding is the head's weight too: freezing it freezes every copy, the
head's included. A "model" block that freezes is therefore refused unless it is untied.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ds_dynmo.models.freezing.front import FreezingCase

__all__ = [
    "AutoFreezeConfig",
    "EgeriaConfig",
    "Freezing",
    "FreezingConfig",
    "FreezingController",
    "auto_freeze",
    "gradient_change",
    "scheduled_blocks",
]

Schedule = tuple[tuple[float, int], ...]


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class AutoFreezeConfig(_Block):
    """When gradients are compared: the "automatic" object in the "freezing" block."""

    interval: float = Field(default=0.1, gt=0, le=1, description="between two decisions, as a fraction of the steps")
    start: float = Field(default=0.2, ge=0, lt=1, description="before the first decision, as a fraction of the steps")


class EgeriaConfig(_Block):
    """Egeria's criterion: the "egeria" object in the "freezing" block.

    Egeria bounds the slope of the plasticity itself, whose scale differs between models; here the bound is relative.
    """

    interval: float = Field(
        default=0.02, gt=0, le=1, description="between two references and evaluations, as a fraction of the steps"
    )
    delay: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="from the batch that is evaluated to the verdict taking effect, as a fraction of the steps; at "
        "most interval",
    )
    start: float = Field(default=0.1, ge=0, lt=1, description="before the first reference, as a fraction of the steps")
    window: int = Field(default=4, ge=2, description="evaluations in a moving average, and averages in a slope")
    threshold: float = Field(
        default=0.05, gt=0, description="slope per evaluation over a block's largest average, below which it is frozen"
    )
    learning_rate_factor: float = Field(
        default=10.0, gt=1, description="a fall of the learning rate by this unfreezes all, and halves the window"
    )

    @field_validator("delay")
    @classmethod
    def _before_the_next(cls, delay: float, info: ValidationInfo) -> float:
        interval = info.data.get("interval")  # absent if it is invalid
        if interval is not None and delay > interval:
            raise ValueError(f"should be at most interval, {interval}")
        return delay


class FreezingConfig(_Block):
    """The "freezing" block: exactly one of "schedule", "automatic" and "egeria"."""

    schedule: Schedule | None = Field(
        default=None,
        description="[[fraction, blocks], ...]: from that fraction of the steps on, so many front blocks are frozen",
    )
    automatic: AutoFreezeConfig | None = Field(default=None, description="AutoFreeze's criterion; {} for its defaults")
    egeria: EgeriaConfig | None = Field(
        default=None, validate_default=True, description="Egeria's criterion; {} for its defaults"
    )

    @property
    def most_blocks(self) -> int:
        """How many blocks the schedule freezes at most; 0 without one."""
        return max((blocks for _, blocks in self.schedule or ()), default=0)

    @field_validator("schedule", mode="before")
    @classmethod
    def _pairs(cls, schedule: Any) -> Schedule | None:
        if schedule is None:
            return None
        if not isinstance(schedule, list | tuple) or not schedule:
            raise ValueError("should be null or a list of [fraction of the steps, blocks], one or more")
        for entry in schedule:
            if not isinstance(entry, list | tuple) or len(entry) != 2:
                raise ValueError(f"should hold pairs [fraction of the steps, blocks], not {entry}")
            fraction, blocks = entry
            if type(fraction) not in (int, float) or not 0 <= fraction < 1:
                raise ValueError(f"should have fractions of the steps in [0, 1), not {fraction}")
            if type(blocks) is not int or blocks < 0:
                raise ValueError(f"should have numbers of blocks of 0 or more, not {blocks}")
        fractions = [fraction for fraction, _ in schedule]
        if any(later <= earlier for earlier, later in zip(fractions, fractions[1:])):
            raise ValueError(f"should have increasing fractions of the steps, not {fractions}")
        return tuple((float(fraction), blocks) for fraction, blocks in schedule)

    @field_validator("egeria")
    @classmethod
    def _one_of_them(cls, egeria: EgeriaConfig | None, info: ValidationInfo) -> EgeriaConfig | None:
        if not info.data.keys() >= {"schedule", "automatic"}:  # one is invalid
            return egeria
        if sum(way is not None for way in (info.data["schedule"], info.data["automatic"], egeria)) != 1:
            raise ValueError('exactly one of "schedule", "automatic" and "egeria" should be given')
        return egeria


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
        previous, current: per block, the gradients' magnitudes summed over the last interval but one, and the last.
    """
    changes = [gradient_change(*pair) for pair in zip(previous[frozen_blocks:], current[frozen_blocks:], strict=True)]
    median = statistics.median(changes)
    return frozen_blocks + next(block for block, change in enumerate(changes) if change >= median)


class FreezingController:
    """Decides how many layers at the front of a model are frozen.

    A block is frozen whole, also where it is two layers (``layers_per_block``). Before each batch, call
    ``set_frozen_prefix(module, controller.frozen_prefix(step))`` where that number changed. With :attr:`automatic`,
    call :meth:`add_gradients` between backward and optimizer step of every batch, and :meth:`evaluate` after it.

    Args:
        blocks: the numbers of the blocks in the layer list.
        num_layers: of the layer list.
        total_steps: of the run.
    """

    def __init__(
        self, config: FreezingConfig, *, blocks: range, num_layers: int, layers_per_block: int = 1, total_steps: int
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._layers_per_block = layers_per_block
        self._total_steps = total_steps
        self._frozen_blocks = 0
        self._previous: list[float] | None = None
        # This rank's share: a layer that migrates leaves here what it has gathered, the sum over all ranks finds it.
        self._sums = torch.zeros(num_layers, dtype=torch.float64)

    @property
    def automatic(self) -> bool:
        """Does this controller look at gradients?"""
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

    def evaluate(self, steps_done: int, sum_over_world: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Decide anew, if an interval ends after ``steps_done`` steps. Collective.

        Args:
            sum_over_world: adds a CPU float64 ``[num_layers]`` tensor over all ranks, collectively.

        Raises:
            RuntimeError: no active block had any gradient.
        """
        automatic = self._config.automatic
        if automatic is None or steps_done % max(1, round(automatic.interval * self._total_steps)):
            return
        # As fp32 numbers: in what order fp64 ones were added depends on where layers and their shards were.
        of_blocks = sum_over_world(self._sums)[self._blocks.start : self._blocks.stop]
        sums = of_blocks.view(-1, self._layers_per_block).sum(dim=1).float().tolist()
        self._sums = torch.zeros_like(self._sums)
        if not any(sums[self._frozen_blocks :]):
            raise RuntimeError(
                f"automatic freezing saw no gradient in blocks {self._frozen_blocks} to {len(sums) - 1} "
                f"up to step {steps_done}"
            )
        if self._previous is not None and steps_done >= round(automatic.start * self._total_steps):
            self._frozen_blocks = auto_freeze(self._previous, sums, self._frozen_blocks)
        self._previous = sums

    def state_dict(self, sum_over_world: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Give what a checkpoint has to hold, as plain JSON values, the same on every rank. Collective."""
        return {
            "frozen_blocks": self._frozen_blocks,
            "previous": self._previous,
            "sums": sum_over_world(self._sums).tolist(),
        }

    def load_state_dict(self, state: dict[str, Any], *, first_rank: bool) -> None:
        """Load what :meth:`state_dict` gave; the first rank takes the sums as its share."""
        self._frozen_blocks = state["frozen_blocks"]
        self._previous = state["previous"]
        self._sums.zero_()
        if first_rank:
            self._sums += torch.tensor(state["sums"], dtype=torch.float64)


class Freezing(FreezingCase):
    """Connects a :class:`FreezingController` to the engine."""

    def __init__(
        self,
        config: FreezingConfig,
        engine: Any,
        *,
        blocks: range,
        num_layers: int,
        layers_per_block: int = 1,
        total_steps: int,
    ) -> None:
        super().__init__(engine, blocks=blocks)
        self._controller = FreezingController(
            config, blocks=blocks, num_layers=num_layers, layers_per_block=layers_per_block, total_steps=total_steps
        )
        self._magnitudes: tuple[torch.Tensor, int] | None = None  # of this batch, and the steps skipped before it
        if self._controller.automatic:
            engine.before_step(self._measure)

    def _measure(self) -> None:
        self._magnitudes = self.engine.gradient_magnitudes(), self.engine.skipped_steps

    def before_batch(self, step: int) -> None:
        """Freeze what the controller says, and tell the engine if that changed."""
        self._freeze(self._controller.frozen_prefix(step))

    def after_batch(self, steps_done: int) -> None:
        """Let the controller decide."""
        self._add_gradients()
        self._controller.evaluate(steps_done, self.engine.sum_over_world)

    def _add_gradients(self) -> None:
        """Let the controller have what was measured, once it is known whether the step was taken."""
        if self._magnitudes is not None:
            magnitudes, skipped = self._magnitudes
            if self.engine.skipped_steps == skipped:  # else they overflowed (fp16)
                self._controller.add_gradients(magnitudes)
            self._magnitudes = None

    def state_dict(self) -> dict[str, Any]:
        """Give the controller's state. Collective."""
        self._add_gradients()
        return self._controller.state_dict(self.engine.sum_over_world)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the controller's state."""
        self._loaded()
        self._controller.load_state_dict(state, first_rank=self.engine.global_rank == 0)
