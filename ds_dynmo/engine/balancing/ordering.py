"""Which pipeline schedule a decision counts with: that in force, and the shortest one by what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_dynmo.config.dynmo import ScheduleConfig
from ds_dynmo.partitioners import PassModel, PipelineModel, loads
from ds_dynmo.plan import LayerCost, limit_without_workspace
from ds_dynmo.schedules import Schedule, replay


@dataclass(frozen=True)
class ScheduleChoice:
    """Between which schedules a decision may choose.

    Attributes:
        config: the kind, and the memory for passes.
        checkpoint_interval: layers of a segment that is recomputed; 0: none are.
        limit_bytes: of a rank, its layers included; None: no limit.
        in_force: now; None: DeepSpeed's 1F1B.
        back_to_back: stages begin a batch before the last ones end the one before.
    """

    config: ScheduleConfig
    checkpoint_interval: int
    limit_bytes: int | None
    in_force: Schedule | None
    back_to_back: bool = False

    def passes(
        self, layers: Sequence[LayerCost], scale: Sequence[float], speeds: tuple[float, ...], micro_batches: int
    ) -> PassModel:
        """Make the model of passes.

        Args:
            scale: per layer, what its measured seconds are multiplied by on a stage of speed 1.
        """

        def seconds(measured: Sequence[float]) -> tuple[float, ...]:
            return tuple(value * by for value, by in zip(measured, scale))

        return PassModel(
            seconds([cost.forward_seconds for cost in layers]),
            seconds([_first_part(cost) for cost in layers]),
            seconds([cost.weight_gradient_seconds for cost in layers]),
            seconds([cost.backward_seconds for cost in layers]),
            tuple(cost.static_bytes for cost in layers),
            tuple(cost.activation_bytes for cost in layers),
            tuple(cost.input_bytes for cost in layers),
            tuple(cost.deferred_bytes for cost in layers),
            micro_batches,
            speeds,
            frozen_layers=next((index for index, cost in enumerate(layers) if cost.trainable_parameters), 0),
            checkpoint_interval=self.checkpoint_interval,
            memory=self.config.memory,
            limit_bytes=None if self.limit_bytes is None else limit_without_workspace(self.limit_bytes, layers),
            may_stay=self.config.kind == "auto",
            output_bytes=tuple(cost.output_bytes for cost in layers),
            in_force=self.in_force,
            back_to_back=self.back_to_back,
        )


class Predicted(NamedTuple):
    """An iteration, simulated."""

    seconds: float
    bubble_ratio: float


def predicted(pipeline: PipelineModel, partition: Sequence[int], schedule: Schedule | None) -> Predicted:
    """Simulate an iteration under ``schedule``; None: under DeepSpeed's 1F1B."""
    if schedule is not None:
        assert pipeline.passes is not None
        timeline = replay(schedule, pipeline.passes.costs(partition))
        return Predicted(timeline.iteration_seconds, timeline.bubble_ratio)
    seconds = pipeline.seconds_under_1f1b(partition)
    both = [f + b for f, b in zip(pipeline.forward_seconds, pipeline.backward_seconds)]
    busy = sum(load / speed for load, speed in zip(loads(both, partition), pipeline.speeds))
    whole = len(pipeline.speeds) * seconds
    return Predicted(seconds, max(0.0, 1.0 - pipeline.micro_batches * busy / whole) if whole else 0.0)


def _first_part(cost: LayerCost) -> float:
    """A layer of which no backward pass ran in two parts has all of it in the first."""
    measured = cost.input_gradient_seconds + cost.weight_gradient_seconds
    return cost.input_gradient_seconds if measured else cost.backward_seconds
