"""Decisions on the number of stages and their partition: rank 0 takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynmo import partitioners
from ds_dynmo.engine.decide.decider import DECIDING
from ds_dynmo.engine.decide.memory import HeldMemory
from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.measure import layer_sizes
from ds_dynmo.engine.resize.planning import Planner
from ds_dynmo.engine.resize.repack_plan import RepackPlan, plan_repack
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import PartitionError, counted
from ds_dynmo.partitioners import Overflow
from ds_dynmo.placement import Placement, owners_of


@dataclass(frozen=True)
class RankFacts:
    """Facts of all ranks for a decision.

    Attributes:
        held: the memory of layers; None without a profile, or without a memory limit.
        parameters: trainable parameters per layer; empty once there is a profile.
    """

    held: HeldMemory | None
    parameters: Sequence[float]


class StageDecision:
    """Chooses a number of stages and a placement on them."""

    def __init__(self, stage: StageContext, rebalancer: Rebalancer) -> None:
        self._stage, self._config, self._rebalancer = stage, stage.config, rebalancer
        self._limit_bytes: int | None = None  # of a rank, as of the latest decision

    def by_hand(self, num_stages: int | None, partition: Sequence[int] | None) -> tuple[Placement, str]:
        """Return the placement for :meth:`Repacker.repack`, and a verdict in a few words. Collective.

        Raises:
            PartitionError, MigrationError: see :meth:`Repacker.repack`. Nothing has changed.
        """
        comm, boundaries = self._stage.comm, None if partition is None else [*map(int, partition)]
        comm.everywhere(DECIDING, lambda: f"repack({num_stages}, partition={boundaries})", same=str)
        facts = self._gather_facts()
        return comm.on_first(DECIDING, lambda: self._new_placement(num_stages, partition, facts))

    def automatic(self) -> Placement:
        """Decide from the smoothed profile: the present placement unless a better one is found. Collective.

        Raises:
            PartitionError, MigrationError: harmless; on every rank.
        """
        held = self._gather_held()
        return self._stage.comm.on_first(DECIDING, lambda: self._planner(held, smoothed=True).best().placement)

    def plan(self, new: Placement) -> RepackPlan:
        """Plan the re-packing from the present placement to ``new``, on fewer stages."""
        profile = self._rebalancer.profile
        layer_bytes = [cost.static_bytes for cost in profile.layers] if profile is not None else None
        return plan_repack(self._stage.placement, new, layer_bytes)

    def predicted_seconds(self, *placements: Placement) -> list[float | None]:
        """Predict the seconds of an iteration at ``placements``, each under its schedule. Collective.

        Returns:
            By placement; None without a profile.
        """
        profile = self._rebalancer.profile

        def seconds(placement: Placement) -> float | None:
            if profile is None:
                return None
            given = self._rebalancer.decider.input(profile, self._limit_bytes, assume_running_schedule=False)
            return given.pipeline_at(placement).on(placement.num_stages).expected_seconds(placement)

        return self._stage.comm.on_first(DECIDING, lambda: [*map(seconds, placements)])

    def _gather_facts(self) -> RankFacts:
        """Gather the facts for a decision. Collective."""
        if self._rebalancer.profile is not None:
            return RankFacts(self._gather_held(), ())
        parameters = layer_sizes.per_layer(self._stage.layers, layer_sizes.trainable_parameters)
        return RankFacts(None, self._stage.comm.max_over_world(parameters).tolist())

    def _gather_held(self) -> HeldMemory | None:
        """Gather the bytes of each layer; None without a limit. Collective."""
        held = self._rebalancer.decider.memory.held()
        self._limit_bytes = held.limit if held is not None else None
        return held

    def _new_placement(
        self, num_stages: int | None, partition: Sequence[int] | None, facts: RankFacts
    ) -> tuple[Placement, str]:
        present = self._stage.placement
        most = present.num_stages
        count = present.stages_for(partition) if num_stages is None and partition is not None else num_stages
        if count is not None and not 1 <= count <= most:
            raise PartitionError(
                f"repack: {counted(count, 'stage')}, there are 1 to {most} to go on with; a job that resumes the last "
                "checkpoint may have more"
            )
        if partition is not None:
            assert count is not None
            return self._rebalancer.placement_of(partition, count), "explicit"
        if facts.parameters:
            assert count is not None
            shape = present.shape_on(count)
            groups, owners = self._rebalancer.decider.groups, owners_of(shape, count)
            spread = partitioners.balanced_groups(facts.parameters, count, groups, owners=owners)
            return Placement.of_shape(shape, spread), "by parameters: there is no profile yet"
        planner = self._planner(facts.held, smoothed=False)
        if count is not None:
            return planner.onto(count).placement, "explicit"
        return planner.best().placement, f"best by planner {self._config.repack.planner}"

    def _planner(self, held: HeldMemory | None, *, smoothed: bool) -> Planner:
        rebalancer, profile = self._rebalancer, self._rebalancer.profile
        assert profile is not None

        def find_overflow(placement: Placement) -> Overflow | None:
            return held.overflow(self.plan(placement).migration) if held is not None else None

        given = rebalancer.decider.input(profile, self._limit_bytes, smoothed=smoothed, assume_running_schedule=False)
        return Planner(given, rebalancer.decider.cost_model.first_seconds, find_overflow)
