"""Decisions: which partition to use, and whether it is worth a move. Pure, so equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_dynmo import partitioners
from ds_dynmo.engine.decide.decision_input import DecisionInput
from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import MemoryModel, Overflow, PipelineModel
from ds_dynmo.placement import Placement, Shape, owners_of
from ds_dynmo.plan import MigrationPlan, Profile
from ds_dynmo.schedules import FoundSchedule, PassCosts, Schedule, idle_share, replay

_TIE = 1e-9  # relative difference below which two bottlenecks are equal


@dataclass(frozen=True)
class Decision:
    """A placement, with predictions.

    Attributes:
        placement: the new placement; the present one if layers stay.
        stage_seconds_before, stage_seconds_after: per micro-batch of each stage.
        verdict: why layers move or stay, in a few words.
        missed_seconds: seconds that a move would have saved until the next decision, if its cost was too high.
        iteration_seconds_before, bubble_ratio_before: under the schedule in force.
        iteration_seconds_after, bubble_ratio_after: under ``found``.
        found: the schedule to use; None: DeepSpeed's 1F1B.
        pass_costs: costs of the search for ``found``; None: there is none.
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
    found: FoundSchedule | None = None
    pass_costs: PassCosts | None = None

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
        return partitioners.imbalance_of_loads(self.stage_seconds_before)

    @property
    def imbalance_after(self) -> float:
        """The paper's equation 2."""
        return partitioners.imbalance_of_loads(self.stage_seconds_after)


def decide(given: DecisionInput) -> Decision:
    """Ask the balancer for a partition, and accept it if it is worth a move.

    Raises:
        PartitionError: as :func:`proposed_placement`.
    """
    return accept_move(given, proposed_placement(given))


def proposed_placement(given: DecisionInput) -> Placement:
    """Ask the balancer for a partition; of several shapes, take the one with the shortest iteration.

    Raises:
        PartitionError: no partition meets the memory limit, or a cost is negative or not finite.
    """
    here = given.placement.shape
    first = (here,) if given.shapes and not given.weighs_shapes else given.shapes
    found = _fitting(given, first) or _fitting(given, given.shapes)
    if not found:
        return _proposed(given, here)
    return min(found, key=lambda placement: _iteration_seconds(given, placement))


def _fitting(given: DecisionInput, shapes: Sequence[Shape]) -> list[Placement]:
    """Ask the balancer for a partition of each of ``shapes``, and leave out those of which none fits in memory."""
    found = []
    for shape in shapes:
        with suppress(PartitionError):
            found.append(_proposed(given, shape))
    return found


def _proposed(given: DecisionInput, shape: Shape) -> Placement:
    """Ask the balancer for a partition of a shape, near the present one if that is of the same shape."""
    costs, speeds = _costs_and_speeds(given)
    here, owners = given.placement, owners_of(shape, given.placement.num_stages)
    is_present = shape == here.shape
    proposed = partitioners.propose(
        given.config.balancer,
        costs,
        here.num_stages,
        start=list(given.partition) if is_present else partitioners.uniform(here.num_layers, len(owners)),
        memory=given.memory,
        pipeline=given.pipeline if given.config.balance_by == "time" else None,
        speeds=speeds,
        layer_bytes=[layer.static_bytes for layer in given.profile.layers],
        groups=given.groups,
        owners=owners,
    )
    return Placement.of_shape(shape, proposed, num_layers=here.num_layers, num_stages=here.num_stages)


def _costs_and_speeds(given: DecisionInput) -> tuple[list[float], tuple[float, ...] | None]:
    """Return costs and stage speeds for the balancer: costs at speed 1 if it takes speeds, else as measured."""
    config = given.config
    if config.balance_by != "time":
        return given.costs(config.balance_by), None
    if not any(partitioners.accepts(config.balancer, offer) for offer in ("pipeline", "speeds")):
        return given.costs("time"), given.speeds
    return list(given.pipeline.layer_seconds), given.speeds


def accept_move(given: DecisionInput, proposed: Placement) -> Decision:
    """Accept ``proposed`` if it is worth a move, or if the present placement breaks the memory limit; else stay.

    A move is worth it if

    - it lowers the bottleneck (for a balancer that takes the pipeline: the seconds of an iteration) by
      ``min_improvement``, or does not raise it and lowers the seconds of an iteration by as much, each placement under
      its shortest schedule; of another shape: it lowers these seconds;
    - with a ``tradeoff``, if time is balanced: this has no objection.

    If a stage lacks memory for the move, layers move only as far as every stage has memory for.
    """
    here, groups, tradeoff = given.placement, given.groups, given.tradeoff
    if proposed == here:
        return predict(given, here, "nothing better was found")
    too_much = _overflow(given, proposed)
    if too_much is not None and proposed.shape != here.shape:
        return predict(given, here, f"going to {proposed}, {too_much}")
    if too_much is not None:
        way = partitioners.between(here.boundaries, proposed.boundaries)
        allowed = (here.at(partition) for partition in way if groups is None or groups.allows(partition))
        fitting = (between for between in allowed if fits(given.memory, between) and _overflow(given, between) is None)
        nearer = next(fitting, None)
        if nearer is None:
            return predict(given, here, f"going to {proposed}, {too_much}")
        part = accept_move(given, nearer)
        return replace(part, verdict=f"{part.verdict}; going to {proposed}, {too_much}")
    if not fits(given.memory, here):
        return predict(given, proposed, "the present partition does not fit in memory")
    if not _improves(given, proposed):
        return predict(given, here, f"{proposed} would be better by less than min_improvement")
    if tradeoff is None or given.config.balance_by != "time":
        return predict(given, proposed, "better")
    saved = _iteration_seconds(given, here) - _iteration_seconds(given, proposed)
    objection = tradeoff.objection(saved, given.batches or 0, given.pipeline, here, proposed)
    if objection is not None:
        stays = predict(given, here, f"{proposed} {objection.reason}")
        return replace(stays, missed_seconds=objection.missed_seconds)
    return predict(given, proposed, "worth it")


def predict(given: DecisionInput, placement: Placement, verdict: str = "") -> Decision:
    """Predict ``placement`` under its shortest schedule, in seconds even if parameters are balanced."""
    pipeline = given.pipeline_at(placement)
    found, passes = pipeline.shortest_schedule(placement), pipeline.passes
    before = _simulated(given.pipeline, given.placement, given.running_schedule)
    after = _simulated(pipeline, placement, found.schedule if found is not None else None)
    return Decision(
        placement,
        tuple(given.pipeline.stage_loads(given.placement)),
        tuple(given.pipeline.stage_loads(placement)),
        before.seconds,
        after.seconds,
        verdict,
        bubble_ratio_before=before.bubble_ratio,
        bubble_ratio_after=after.bubble_ratio,
        found=found,
        pass_costs=passes.costs(placement) if found is not None and passes is not None else None,
    )


class _Simulated(NamedTuple):
    """A simulated iteration."""

    seconds: float
    bubble_ratio: float


def _simulated(pipeline: PipelineModel, placement: Placement, schedule: Schedule | None) -> _Simulated:
    """Simulate an iteration under ``schedule``; None: 1F1B, or with two chunks per stage the order that would run."""
    if schedule is None and placement.shape != "chain" and pipeline.passes is not None:
        found = pipeline.shortest_schedule(placement)
        schedule = found.schedule if found is not None else pipeline.passes.for_equal_costs(placement)
    if schedule is not None and pipeline.passes is not None:
        timeline = replay(schedule, pipeline.passes.costs(placement))
        return _Simulated(timeline.iteration_seconds, timeline.bubble_ratio)
    seconds = pipeline.seconds_under_1f1b(placement)
    busy = sum(pipeline.stage_loads(placement))
    return _Simulated(seconds, idle_share(pipeline.micro_batches * busy, len(pipeline.speeds) * seconds))


def moved_bytes(profile: Profile, plan: MigrationPlan) -> int:
    """Count the static bytes of the layers that change stage."""
    return sum(profile.layers[move.layer].static_bytes for move in plan.moves)


def _improves(given: DecisionInput, proposed: Placement) -> bool:
    """Return whether it lowers the objective by ``min_improvement``, or the iteration's seconds without raising it."""

    def lower(before: float, after: float) -> bool:
        return after < before and before - after >= given.config.min_improvement * before

    before, after = (_objective(given, placement) for placement in (given.placement, proposed))
    if proposed.shape == given.placement.shape and (lower(before, after) or after > before * (1 + _TIE)):
        return lower(before, after)
    return lower(*(_iteration_seconds(given, placement) for placement in (given.placement, proposed)))


def _objective(given: DecisionInput, placement: Placement) -> float:
    """Compute what the balancer minimises."""
    config = given.config
    if config.balance_by != "time":
        return max(partitioners.loads_of(given.profile.costs(config.balance_by), placement))
    if partitioners.accepts(config.balancer, "pipeline"):
        return _iteration_seconds(given, placement)
    return max(given.pipeline.stage_loads(placement))


def _iteration_seconds(given: DecisionInput, placement: Placement) -> float:
    """Simulate an iteration under the shortest schedule, and return its seconds."""
    return given.pipeline.iteration_seconds(placement)


def fits(memory: MemoryModel | None, placement: Placement) -> bool:
    """Return whether every stage has enough memory to train at ``placement``; ``memory`` None: there is no limit."""
    if memory is None:
        return True
    return all(needed <= limit for needed, limit in zip(memory.bytes_per_stage(placement), memory.limits))


def _overflow(given: DecisionInput, proposed: Placement) -> Overflow | None:
    """Find the stage that lacks memory for a move to ``proposed``; None if no stage does."""
    memory = given.memory
    if memory is None:
        return None
    layers = given.profile.layers
    return partitioners.overflow(
        MigrationPlan.between(given.placement, proposed),
        [layer.held for layer in layers],
        [layer.first_use for layer in layers],
        min(memory.limits),
        memory.bytes_per_stage(given.placement),
    )
