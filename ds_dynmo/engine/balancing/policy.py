"""The decision itself: where layers should go, and whether that is worth a move. The same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ds_dynmo import partitioners
from ds_dynmo.config import DynMoConfig
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import CostHistory, MemoryModel, MoveCosts, Overflow, PipelineModel
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan, Profile

_STANDARD_ERRORS = 3.0  # by which a saving has to exceed what it may be off by
_TIE = 1e-9  # relative difference below which two bottlenecks are equal


@dataclass(frozen=True)
class Decision:
    """A partition to go to, and what is predicted of it. Bottlenecks are seconds per micro-batch of the slowest stage.

    Attributes:
        verdict: why layers move or stay, in a few words.
        missed_seconds: what is let go by staying, until the next decision, because moving would cost more.
    """

    partition: tuple[int, ...]
    bottleneck_seconds_before: float
    bottleneck_seconds_after: float
    imbalance_before: float
    imbalance_after: float
    iteration_seconds_before: float
    iteration_seconds_after: float
    verdict: str = ""
    missed_seconds: float = 0.0


@dataclass(frozen=True)
class DecisionInput:
    """What a decision is taken from.

    Attributes:
        current: the partition in force.
        profile: costs, and the partition under which they were measured.
        speeds: per stage; None: equal.
    """

    current: tuple[int, ...]
    profile: Profile
    speeds: tuple[float, ...] | None = None

    @classmethod
    def of(cls, profile: Profile, speeds: tuple[float, ...] | None = None) -> DecisionInput:
        """With the profile's own partition in force."""
        return cls(profile.partition, profile, speeds)

    @cached_property
    def placement(self) -> Placement:
        """Where layers are: a chain, as long as balancers know of no other."""
        return Placement.chain(self.current)

    @cached_property
    def pipeline(self) -> PipelineModel:
        """Layers' seconds on a stage of speed 1, and all that simulating takes."""
        profile = self.profile
        speeds = self.speeds or (1.0,) * self.placement.num_stages
        where = [speeds[profile.placement.stage_of(layer)] for layer in range(len(profile.layers))]
        return PipelineModel(
            tuple(cost.forward_seconds * speed for cost, speed in zip(profile.layers, where)),
            tuple(cost.backward_seconds * speed for cost, speed in zip(profile.layers, where)),
            profile.micro_batches,
            speeds,
            tuple(cost.static_bytes for cost in profile.layers),
        )

    def costs(self, balance_by: Literal["time", "parameters"]) -> list[float]:
        """Per layer, of a balancer that knows of no speeds: time is what it takes where the layer is now."""
        if balance_by != "time":
            return self.profile.costs(balance_by)
        pipeline, current = self.pipeline, self.placement
        seconds = zip(pipeline.forward_seconds, pipeline.backward_seconds)
        return [(f + b) / pipeline.speeds[current.stage_of(layer)] for layer, (f, b) in enumerate(seconds)]


@dataclass(frozen=True)
class MoveTradeoff:
    """What an automatic decision weighs.

    Attributes:
        batches: until the next decision.
        move_costs: what moves took so far.
        errors: per layer, the relative standard error of its cost.
        missed_seconds: what the decisions before let go in a row.
    """

    batches: int
    move_costs: MoveCosts
    errors: tuple[float, ...]
    missed_seconds: float = 0.0


def decide(
    given: DecisionInput,
    config: DynMoConfig,
    memory: MemoryModel | None,
    tradeoff: MoveTradeoff | None = None,
    groups: LayerGroups | None = None,
) -> Decision:
    """The balancer's partition if it is worth a move from the present one, else the present one.

    Args:
        groups: layers that stay together; None: each may be anywhere.

    Raises:
        PartitionError: no partition meets the memory limit, or a cost is no cost.
    """
    num_stages = given.placement.num_stages
    costs, speeds = costs_and_speeds(given, config)
    proposed = partitioners.propose(
        config.balancer,
        costs,
        num_stages,
        start=list(given.current),
        memory=memory,
        pipeline=given.pipeline if config.balance_by == "time" else None,
        speeds=speeds,
        layer_bytes=[layer.static_bytes for layer in given.profile.layers],
        groups=groups,
    )
    return accept_move(given, given.placement.at(proposed).boundaries, config, memory, tradeoff, groups)


def costs_and_speeds(given: DecisionInput, config: DynMoConfig) -> tuple[list[float], tuple[float, ...] | None]:
    """What the balancer is given: costs on a stage of speed 1 if it knows of speeds, else those where layers are."""
    if config.balance_by != "time":
        return given.costs(config.balance_by), None
    if not any(partitioners.takes(config.balancer, offer) for offer in ("pipeline", "speeds")):
        return given.costs("time"), given.speeds
    pipeline = given.pipeline
    return [f + b for f, b in zip(pipeline.forward_seconds, pipeline.backward_seconds)], given.speeds


def accept_move(
    given: DecisionInput,
    proposed: tuple[int, ...],
    config: DynMoConfig,
    memory: MemoryModel | None,
    tradeoff: MoveTradeoff | None = None,
    groups: LayerGroups | None = None,
) -> Decision:
    """``proposed`` if it is worth it, or if the present partition breaks the memory limit.

    Worth it is what lowers the bottleneck (with a balancer that takes the pipeline: the iteration's seconds) by
    ``min_improvement``, or leaves it as it is and lowers the iteration's seconds by as much; and with ``tradeoff``,
    where time is balanced, what lowers the iteration by more than noise explains, and saves more until the next
    decision than the move costs, what was missed since layers could first have moved added. So a small gain that lasts
    is taken in the end, at no more than twice the least possible cost, however short the interval. Where a stage lacks
    the memory that the move takes, layers go as far as all stages have it.
    """
    current = given.current
    if proposed == current:
        return predict(given, current, "nothing better was found")
    too_much = _overflow(given, proposed, memory)
    if too_much is not None:
        way = [on_it for on_it in partitioners.between(current, proposed) if groups is None or groups.allows(on_it)]
        fitting = (on_it for on_it in way if _fits(on_it, memory) and _overflow(given, on_it, memory) is None)
        nearer = next(fitting, None)
        if nearer is None:
            return predict(given, current, f"going to {list(proposed)}, {too_much}")
        part = accept_move(given, nearer, config, memory, tradeoff, groups)
        return replace(part, verdict=f"{part.verdict}; going to {list(proposed)}, {too_much}")
    if not _fits(current, memory):
        return predict(given, proposed, "the present partition does not fit in memory")
    if not _improves(given, proposed, config):
        return predict(given, current, f"{list(proposed)} would be better by less than min_improvement")
    if tradeoff is None or config.balance_by != "time":
        return predict(given, proposed, "better")
    pipeline = given.pipeline
    saved = pipeline.iteration_seconds(current) - pipeline.iteration_seconds(proposed)
    if not _certain(saved, given, proposed, tradeoff.errors):
        return predict(given, current, f"{list(proposed)} would save {saved:.3g} s a batch, no more than noise may")
    seconds = tradeoff.move_costs.seconds(moved_bytes(given.profile, MigrationPlan.between(current, proposed)))
    if saved * tradeoff.batches + tradeoff.missed_seconds <= seconds:
        stays = predict(
            given,
            current,
            f"{list(proposed)} would save {saved:.3g} s in each of {tradeoff.batches} batches and cost {seconds:.3g} s",
        )
        return replace(stays, missed_seconds=saved * tradeoff.batches)
    return predict(given, proposed, "worth it")


def predict(given: DecisionInput, partition: tuple[int, ...], verdict: str = "") -> Decision:
    """What the profile lets expect of ``partition``, in seconds whatever was balanced."""
    before, after = _stage_seconds(given.pipeline, given.current), _stage_seconds(given.pipeline, partition)
    return Decision(
        partition,
        max(before),
        max(after),
        partitioners.imbalance(before, range(len(before) + 1)),
        partitioners.imbalance(after, range(len(after) + 1)),
        given.pipeline.iteration_seconds(given.current),
        given.pipeline.iteration_seconds(partition),
        verdict,
    )


def moved_bytes(profile: Profile, plan: MigrationPlan) -> int:
    """Static bytes of the layers that change stage."""
    return sum(profile.layers[move.layer].static_bytes for move in plan.moves)


def _improves(given: DecisionInput, proposed: tuple[int, ...], config: DynMoConfig) -> bool:
    """Does it lower the objective by ``min_improvement`` or, where it raises none, the iteration's seconds?"""

    def lower(before: float, after: float) -> bool:
        return after < before and before - after >= config.min_improvement * before

    before, after = (_objective(given, partition, config) for partition in (given.current, proposed))
    if lower(before, after) or after > before * (1 + _TIE):
        return lower(before, after)
    return lower(*(given.pipeline.iteration_seconds(partition) for partition in (given.current, proposed)))


def _objective(given: DecisionInput, partition: tuple[int, ...], config: DynMoConfig) -> float:
    if config.balance_by != "time":
        return partitioners.bottleneck(given.profile.costs(config.balance_by), partition)
    if partitioners.takes(config.balancer, "pipeline"):
        return given.pipeline.iteration_seconds(partition)
    return max(_stage_seconds(given.pipeline, partition))


def _stage_seconds(pipeline: PipelineModel, partition: Sequence[int]) -> list[float]:
    both = [f + b for f, b in zip(pipeline.forward_seconds, pipeline.backward_seconds)]
    return [load / speed for load, speed in zip(partitioners.loads(both, partition), pipeline.speeds)]


def _certain(saved: float, given: DecisionInput, proposed: tuple[int, ...], errors: Sequence[float]) -> bool:
    """Is what an iteration saves more than noise explains, whichever stage turns out to be the slowest then?

    Against each stage to be: what the slowest present one has more than it, of which the standard error is that of the
    layers that only one of the two has.
    """
    pipeline, current = given.pipeline, given.current
    now, then = given.placement, given.placement.at(proposed)
    seconds = np.add(pipeline.forward_seconds, pipeline.backward_seconds)
    noise = seconds * errors * pipeline.micro_batches
    slowest = int(np.argmax(_stage_seconds(pipeline, current)))
    share = np.zeros(len(seconds))
    share[list(now.layers_of(slowest))] = 1.0 / pipeline.speeds[slowest]
    loads = _stage_seconds(pipeline, proposed)
    for stage, load in enumerate(loads):
        only_one = share.copy()
        only_one[list(then.layers_of(stage))] -= 1.0 / pipeline.speeds[stage]
        gain = saved + pipeline.micro_batches * (max(loads) - load)
        if gain <= _STANDARD_ERRORS * float(np.linalg.norm(only_one * noise)):
            return False
    return True


def _fits(partition: Sequence[int], memory: MemoryModel | None) -> bool:
    if memory is None:
        return True
    return all(needed <= limit for needed, limit in zip(memory.bytes_per_stage(partition), memory.limits))


def _overflow(given: DecisionInput, partition: Sequence[int], memory: MemoryModel | None) -> Overflow | None:
    """What a move to ``partition`` takes that a stage has no room for while layers move."""
    if memory is None:
        return None
    layers, current = given.profile.layers, given.current
    return partitioners.overflow(
        MigrationPlan.between(current, partition),
        [layer.held for layer in layers],
        [layer.first_use for layer in layers],
        min(memory.limits),
        memory.bytes_per_stage(current),
    )


@dataclass
class CostModel:
    """What a run has learnt about its layers, its stages and its moves; goes into checkpoints."""

    history: CostHistory = field(default_factory=CostHistory)
    move_costs: MoveCosts = field(default_factory=MoveCosts)
    first_seconds: float | None = None  # of an iteration at the start of the run, balanced: simulated
    _moved_bytes: int | None = None  # of a move whose seconds the ranks have still to tell each other
    _missed_seconds: float = 0.0

    def profiled(self, profile: Profile, move_seconds: float, groups: LayerGroups | None = None) -> None:
        """Take in one more profile.

        Args:
            move_seconds: that moves since the last took, on the slowest rank.
            groups: layers that stay together; None: each may be anywhere.
        """
        self.history.observe(profile)
        if self.first_seconds is None:
            pipeline = DecisionInput.of(profile).pipeline
            groups = groups or LayerGroups.single(len(profile.layers))
            balanced = partitioners.balanced_groups(profile.costs("time"), profile.placement.num_stages, groups)
            self.first_seconds = min(map(pipeline.iteration_seconds, (profile.partition, balanced)))
        if self._moved_bytes is not None and move_seconds > 0:
            self.move_costs.record(self._moved_bytes, move_seconds)
        self._moved_bytes = None

    def model_changed(self) -> None:
        """Layers cost something else from here on."""
        self.history.forget()
        self._missed_seconds = 0.0

    def stages_changed(self) -> None:
        """There are fewer or more stages than before: what is known of stages is of others."""
        self.history.forget_stages()
        self._moved_bytes, self._missed_seconds = None, 0.0

    def decided(self, decision: Decision) -> None:
        """A decision was taken; one that does not let anything go begins anew."""
        self._missed_seconds = self._missed_seconds + decision.missed_seconds if decision.missed_seconds else 0.0

    def moved(self, profile: Profile, plan: MigrationPlan) -> None:
        """Layers have moved; ``profile`` says how many bytes they have."""
        self._moved_bytes = (self._moved_bytes or 0) + moved_bytes(profile, plan)

    def decision_input(self, profile: Profile, current: tuple[int, ...], *, smoothed: bool) -> DecisionInput:
        """Of the latest profile; ``smoothed``: with what earlier ones say of the same."""
        return DecisionInput(current, self.history.smoothed(profile) if smoothed else profile, self.history.speeds)

    def move_tradeoff(self, batches: int) -> MoveTradeoff:
        """For a decision whose effect lasts so many batches."""
        return MoveTradeoff(batches, self.move_costs, self.history.errors, self._missed_seconds)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "history": self.history.state(),
            "moves": self.move_costs.state(),
            "first_seconds": self.first_seconds,
            "moved_bytes": self._moved_bytes,
            "missed_seconds": self._missed_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where :meth:`state_dict` was taken."""
        self.history.load(state["history"])
        self.move_costs = MoveCosts(state["moves"])
        self.first_seconds = state.get("first_seconds")
        self._moved_bytes = state["moved_bytes"]
        self._missed_seconds = state["missed_seconds"]
