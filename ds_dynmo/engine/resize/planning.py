"""The planner of a re-packing: it chooses the number of stages and the partition from a profile. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_dynmo import partitioners
from ds_dynmo.engine.decide.decision_input import DecisionInput
from ds_dynmo.errors import PartitionError, counted
from ds_dynmo.partitioners import Overflow, Packing
from ds_dynmo.placement import Placement


@dataclass(frozen=True)
class Planner:
    """Chooses a number of stages and a partition.

    Attributes:
        given: the input of decisions: present placement, profile and others.
        most: the largest possible number of stages: at work and parked.
        first_seconds: of the iteration that ``max_slowdown`` refers to; None before the first profile.
        find_overflow: returns the stage that lacks memory for the move to a partition; None if no stage does.
    """

    given: DecisionInput
    most: int
    first_seconds: float | None
    find_overflow: Callable[[Sequence[int]], Overflow | None] = lambda _: None

    def onto(self, num_stages: int) -> Packing:
        """Partition the layers over exactly ``num_stages`` stages.

        Raises:
            PartitionError: fewer than 1 stage, more than there are or than layers, or no partition fits in memory
                (names a number of stages that would).
        """
        if not 1 <= num_stages <= self.most:
            raise PartitionError(f"repack: num_stages = {num_stages}, there are 1 to {self.most} to go on with")
        try:
            return partitioners.pack_onto(self._balance, self.given.pipeline, num_stages)
        except PartitionError as error:
            fitting = [count for count in range(num_stages + 1, self.most + 1) if self._fits(count)]
            hint = f"; {counted(fitting[0], 'stage')} would do" if fitting else ""
            raise PartitionError(f"repack onto {counted(num_stages, 'stage')}: {error}{hint}") from error

    def best(self) -> Packing:
        """Choose by ``dynmo.repack.planner``: the present partition unless a better one is found."""
        repack, present = self.given.config.repack, self._present()
        least = min(repack.min_stages, present.num_stages)
        if repack.planner == "first_fit":
            if self.given.memory is None:
                raise PartitionError('repack: planner "first_fit" packs by memory, and there is no memory_limit')
            packed = partitioners.first_fit(present.partition, partitioners.fits_on(self.given.memory), target=least)
            num_stages = Placement.chain(packed).num_stages
            return self._fewest(num_stages, present.num_stages - 1, math.inf) or present
        if self.first_seconds is None:
            return present
        within = self.first_seconds / (1.0 - repack.max_slowdown)
        margin = self.given.config.min_improvement  # so that jitter does not release stages and call them back in turns
        fewer = self._fewest(least, present.num_stages - 1, within * (1.0 - margin))
        if fewer is not None:
            return fewer
        if present.iteration_seconds <= within or self.most == present.num_stages:
            return present
        more = self._fewest(present.num_stages + 1, self.most, within) or self.onto(self.most)
        gain = present.iteration_seconds - more.iteration_seconds
        return more if gain >= margin * within else present

    def _fewest(self, least: int, most: int, within_seconds: float) -> Packing | None:
        return partitioners.fewest_stages(
            self._balance, self.given.pipeline, most, least=least, within_seconds=within_seconds
        )

    def _present(self) -> Packing:
        return Packing(self.given.partition, self.given.pipeline.iteration_seconds(self.given.partition))

    def _fits(self, count: int) -> bool:
        try:
            partitioners.pack_onto(self._balance, self.given.pipeline, count)
        except PartitionError:
            return False
        return True

    def _balance(self, count: int) -> Sequence[int]:
        config, profile = self.given.config, self.given.profile
        by_time = config.balance_by == "time"
        pipeline = self.given.pipeline.on(count)
        partition = partitioners.propose(
            config.balancer,
            list(pipeline.layer_seconds) if by_time else profile.costs("parameters"),
            count,
            start=partitioners.uniform(len(profile.layers), count),
            memory=self.given.memory.on(count) if self.given.memory is not None else None,
            pipeline=pipeline if by_time else None,
            speeds=None,
            groups=self.given.groups,
        )
        overflow = self.find_overflow(partition)
        if overflow is not None:
            raise PartitionError(f"going to {list(partition)}, {overflow}")
        return partition
