"""Decide where layers should go, and whether that is worth a move. Every rank decides the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from ds_dynmo import partitioners
from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.balancing.ordering import ScheduleChoice, predicted
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import MemoryModel, MoveCosts, Overflow, PipelineModel
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan, Profile
from ds_dynmo.schedules import PassCosts, Schedule

_STANDARD_ERRORS = 3.0  # of the measurement, which a saving has to exceed
_TIE = 1e-9  # relative difference below which two bottlenecks are equal


@dataclass(frozen=True)
class Decision:
    """A placement to go to, and what is predicted of it.

    Attributes:
        placement: the present one, if layers stay.
        stage_seconds_before, stage_seconds_after: per micro-batch of each stage.
        verdict: why layers move or stay, in a few words.
        missed_seconds: what a move would have saved until the next decision, where it was rejected for its cost.
        iteration_seconds_before, bubble_ratio_before: under the schedule in force.
        iteration_seconds_after, bubble_ratio_after: under ``schedule``.
        schedule: to go on with; None: DeepSpeed's 1F1B.
        pass_costs: that ``schedule`` is for; None: there is none.
        lower_bound_seconds: below which no order can be at ``placement``; None: no order was searched.
    """

    placement: Placement
    stage_seconds_before: tuple[float, ...]
    stage_seconds_after: tuple[float, ...]
    iteration_seconds_before: float
    iteration_seconds_after: float
    verdict: str = ""
    missed_seconds: float = 0.0
    bubble_ratio_before: float = 0.0
    bubble_ratio_after: float = 0.0
    schedule: Schedule | None = None
    pass_costs: PassCosts | None = None
    lower_bound_seconds: float | None = None

    @property
    def partition(self) -> tuple[int, ...]:
        """The boundaries of :attr:`placement`."""
        return self.placement.boundaries

    @property
    def bottleneck_seconds_before(self) -> float:
        """The seconds per micro-batch of the slowest stage."""
        return max(self.stage_seconds_before)

    @property
    def bottleneck_seconds_after(self) -> float:
        """The seconds per micro-batch of the slowest stage."""
        return max(self.stage_seconds_after)

    @property
    def imbalance_before(self) -> float:
        """The paper's equation 2."""
        return partitioners.imbalance(self.stage_seconds_before, range(len(self.stage_seconds_before) + 1))

    @property
    def imbalance_after(self) -> float:
        """The paper's equation 2."""
        return partitioners.imbalance(self.stage_seconds_after, range(len(self.stage_seconds_after) + 1))


@dataclass(frozen=True)
class DecisionInput:
    """What a decision is taken from.

    Attributes:
        placement: where layers are.
        profile: costs, and the placement under which they were measured.
        speeds: per stage; None: equal.
        schedules: to choose from; None: DeepSpeed's 1F1B is the only one.
    """

    placement: Placement
    profile: Profile
    speeds: tuple[float, ...] | None = None
    schedules: ScheduleChoice | None = None

    @classmethod
    def of(cls, profile: Profile, speeds: tuple[float, ...] | None = None) -> DecisionInput:
        """Take the profile's own placement for the present one."""
        return cls(profile.placement, profile, speeds)

    @property
    def partition(self) -> tuple[int, ...]:
        """The boundaries of :attr:`placement`."""
        return self.placement.boundaries

    @cached_property
    def pipeline(self) -> PipelineModel:
        """The layers' seconds on a stage of speed 1, and what else a simulated iteration needs."""
        profile = self.profile
        speeds = self.speeds or (1.0,) * self.placement.num_stages
        where = [speeds[profile.placement.stage_of(layer)] for layer in range(len(profile.layers))]
        return PipelineModel(
            tuple(cost.forward_seconds * speed for cost, speed in zip(profile.layers, where)),
            tuple(cost.backward_seconds * speed for cost, speed in zip(profile.layers, where)),
            profile.micro_batches,
            speeds,
            tuple(cost.static_bytes for cost in profile.layers),
            passes=(
                self.schedules.passes(profile.layers, where, speeds, profile.micro_batches) if self.schedules else None
            ),
        )

    def costs(self, balance_by: Literal["time", "parameters"]) -> list[float]:
        """Costs per layer for a balancer that does not know stage speeds: seconds are those on the present stage."""
        if balance_by != "time":
            return self.profile.costs(balance_by)
        pipeline, here = self.pipeline, self.placement
        seconds = zip(pipeline.forward_seconds, pipeline.backward_seconds)
        return [(f + b) / pipeline.speeds[here.stage_of(layer)] for layer, (f, b) in enumerate(seconds)]


@dataclass(frozen=True)
class MoveTradeoff:
    """What an automatic decision weighs a gain against.

    Attributes:
        batches: until the next decision.
        move_costs: seconds and bytes of the moves so far.
        errors: per layer, the relative standard error of its cost.
        stage_errors: per layer, a part that it shares with its stage.
        missed_seconds: gains that the decisions before this one rejected in a row for the cost of the move.
    """

    batches: int
    move_costs: MoveCosts
    errors: tuple[float, ...]
    stage_errors: tuple[float, ...]
    missed_seconds: float = 0.0


def decide(
    given: DecisionInput,
    config: DynMoConfig,
    memory: MemoryModel | None,
    tradeoff: MoveTradeoff | None = None,
    groups: LayerGroups | None = None,
) -> Decision:
    """Ask the balancer for a partition; stay where layers are if that is not worth a move.

    Args:
        memory: None: no limit.
        tradeoff: None: the cost of the move and the noise of the measurement do not count.
        groups: layers that stay together; None: each may be anywhere.

    Raises:
        PartitionError: no partition meets the memory limit, or a cost is negative or not finite.
    """
    costs, speeds = costs_and_speeds(given, config)
    proposed = partitioners.propose(
        config.balancer,
        costs,
        given.placement.num_stages,
        start=list(given.partition),
        memory=memory,
        pipeline=given.pipeline if config.balance_by == "time" else None,
        speeds=speeds,
        layer_bytes=[layer.static_bytes for layer in given.profile.layers],
        groups=groups,
    )
    return accept_move(given, given.placement.at(proposed), config, memory, tradeoff, groups)


def costs_and_speeds(given: DecisionInput, config: DynMoConfig) -> tuple[list[float], tuple[float, ...] | None]:
    """Costs and stage speeds for the balancer: costs on a stage of speed 1 if it takes speeds, else as measured."""
    if config.balance_by != "time":
        return given.costs(config.balance_by), None
    if not any(partitioners.takes(config.balancer, offer) for offer in ("pipeline", "speeds")):
        return given.costs("time"), given.speeds
    pipeline = given.pipeline
    return [f + b for f, b in zip(pipeline.forward_seconds, pipeline.backward_seconds)], given.speeds


def accept_move(
    given: DecisionInput,
    proposed: Placement,
    config: DynMoConfig,
    memory: MemoryModel | None,
    tradeoff: MoveTradeoff | None = None,
    groups: LayerGroups | None = None,
) -> Decision:
    """Go to ``proposed`` if that is worth a move, or if the present placement breaks the memory limit; else stay.

    A move is worth it if

    - it lowers the bottleneck (for a balancer that takes the pipeline: the seconds of an iteration) by
      ``min_improvement``, or does not raise it and lowers the seconds of an iteration by as much, each placement under
      its shortest schedule;
    - with ``tradeoff``, where time is balanced: it saves more than noise explains, and what it saves until the next
      decision, with what was missed before, exceeds its cost. So a small gain that lasts is taken in the end, at no
      more than twice the least possible cost, however short the interval.

    If a stage lacks the memory that the move takes, layers go as far as every stage has it.
    """
    here = given.placement
    if proposed == here:
        return predict(given, here, "nothing better was found")
    too_much = _overflow(given, proposed, memory)
    if too_much is not None:
        way = partitioners.between(here.boundaries, proposed.boundaries)
        allowed = (here.at(bounds) for bounds in way if groups is None or groups.allows(bounds))
        fitting = (on_it for on_it in allowed if _fits(on_it, memory) and _overflow(given, on_it, memory) is None)
        nearer = next(fitting, None)
        if nearer is None:
            return predict(given, here, f"going to {proposed}, {too_much}")
        part = accept_move(given, nearer, config, memory, tradeoff, groups)
        return replace(part, verdict=f"{part.verdict}; going to {proposed}, {too_much}")
    if not _fits(here, memory):
        return predict(given, proposed, "the present partition does not fit in memory")
    if not _improves(given, proposed, config):
        return predict(given, here, f"{proposed} would be better by less than min_improvement")
    if tradeoff is None or config.balance_by != "time":
        return predict(given, proposed, "better")
    saved = _iteration_seconds(given, here) - _iteration_seconds(given, proposed)
    if not _exceeds_noise(saved, given, proposed, tradeoff):
        return predict(given, here, f"{proposed} would save {saved:.3g} s a batch, no more than noise may")
    cost = tradeoff.move_costs.seconds(moved_bytes(given.profile, MigrationPlan.between(here, proposed)))
    if saved * tradeoff.batches + tradeoff.missed_seconds <= cost:
        verdict = f"{proposed} would save {saved:.3g} s in each of {tradeoff.batches} batches and cost {cost:.3g} s"
        return replace(predict(given, here, verdict), missed_seconds=saved * tradeoff.batches)
    return predict(given, proposed, "worth it")


def predict(given: DecisionInput, placement: Placement, verdict: str = "") -> Decision:
    """Predict what ``placement`` gives under its shortest schedule, in seconds even where parameters are balanced."""
    found = given.pipeline.shortest_schedule(placement.boundaries)
    if found is None:
        return _predict(given, placement, None, verdict)
    bound = found.lower_bound_seconds
    return replace(_predict(given, placement, found.schedule, verdict), lower_bound_seconds=bound)


def _predict(given: DecisionInput, placement: Placement, schedule: Schedule | None, verdict: str) -> Decision:
    in_force = given.schedules.in_force if given.schedules else None
    iteration_before = predicted(given.pipeline, given.partition, in_force)
    iteration_after = predicted(given.pipeline, placement.boundaries, schedule)
    return Decision(
        placement,
        tuple(_stage_seconds(given, given.placement)),
        tuple(_stage_seconds(given, placement)),
        iteration_before.seconds,
        iteration_after.seconds,
        verdict,
        bubble_ratio_before=iteration_before.bubble_ratio,
        bubble_ratio_after=iteration_after.bubble_ratio,
        schedule=schedule,
        pass_costs=given.pipeline.passes.costs(placement.boundaries) if schedule and given.pipeline.passes else None,
    )


def moved_bytes(profile: Profile, plan: MigrationPlan) -> int:
    """Count the static bytes of the layers that change stage."""
    return sum(profile.layers[move.layer].static_bytes for move in plan.moves)


def _improves(given: DecisionInput, proposed: Placement, config: DynMoConfig) -> bool:
    """Does it lower the objective by ``min_improvement`` or, without raising it, the seconds of an iteration?"""

    def lower(before: float, after: float) -> bool:
        return after < before and before - after >= config.min_improvement * before

    before, after = (_objective(given, placement, config) for placement in (given.placement, proposed))
    if lower(before, after) or after > before * (1 + _TIE):
        return lower(before, after)
    return lower(*(_iteration_seconds(given, placement) for placement in (given.placement, proposed)))


def _objective(given: DecisionInput, placement: Placement, config: DynMoConfig) -> float:
    """What the balancer minimises."""
    if config.balance_by != "time":
        return partitioners.bottleneck(given.profile.costs(config.balance_by), placement.boundaries)
    if partitioners.takes(config.balancer, "pipeline"):
        return _iteration_seconds(given, placement)
    return max(_stage_seconds(given, placement))


def _iteration_seconds(given: DecisionInput, placement: Placement) -> float:
    """Simulated seconds of an iteration, under the shortest schedule."""
    return given.pipeline.iteration_seconds(placement.boundaries)


def _stage_seconds(given: DecisionInput, placement: Placement) -> list[float]:
    """Seconds per micro-batch of each stage."""
    pipeline = given.pipeline
    both = [f + b for f, b in zip(pipeline.forward_seconds, pipeline.backward_seconds)]
    return [load / speed for load, speed in zip(partitioners.loads(both, placement.boundaries), pipeline.speeds)]


def _exceeds_noise(saved: float, given: DecisionInput, proposed: Placement, tradeoff: MoveTradeoff) -> bool:
    """Does an iteration save more than noise explains, whichever stage turns out to be the slowest then?

    Compares the slowest present stage with each stage to be. The standard error of their difference is that of the
    layers that only one of the two has, and that of the stages on which these were measured.
    """
    pipeline, here = given.pipeline, given.placement
    seconds = pipeline.micro_batches * np.add(pipeline.forward_seconds, pipeline.backward_seconds)
    measured_on = np.array([here.stage_of(layer) for layer in range(len(seconds))])
    slowest = int(np.argmax(_stage_seconds(given, here)))
    share = np.zeros(len(seconds))
    share[list(here.layers_of(slowest))] = 1.0 / pipeline.speeds[slowest]
    loads = _stage_seconds(given, proposed)
    for stage, load in enumerate(loads):
        only_one = share.copy()
        only_one[list(proposed.layers_of(stage))] -= 1.0 / pipeline.speeds[stage]
        of_layers = only_one * seconds * tradeoff.errors
        of_stages = np.bincount(measured_on, only_one * seconds * tradeoff.stage_errors)
        gain = saved + pipeline.micro_batches * (max(loads) - load)
        if gain <= _STANDARD_ERRORS * math.hypot(*of_layers, *of_stages):
            return False
    return True


def _fits(placement: Placement, memory: MemoryModel | None) -> bool:
    if memory is None:
        return True
    return all(needed <= limit for needed, limit in zip(memory.bytes_per_stage(placement.boundaries), memory.limits))


def _overflow(given: DecisionInput, proposed: Placement, memory: MemoryModel | None) -> Overflow | None:
    """The stage that lacks the memory for a move to ``proposed``; None: no stage does."""
    if memory is None:
        return None
    layers = given.profile.layers
    return partitioners.overflow(
        MigrationPlan.between(given.placement, proposed),
        [layer.held for layer in layers],
        [layer.first_use for layer in layers],
        min(memory.limits),
        memory.bytes_per_stage(given.partition),
    )
