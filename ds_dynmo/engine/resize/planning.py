"""The planner of a re-packing: it chooses the number of stages and the partition from a profile. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ds_dynmo import partitioners
from ds_dynmo.engine.decide.decision_input import DecisionInput
from ds_dynmo.errors import PartitionError, counted
from ds_dynmo.partitioners import Overflow, Packing
from ds_dynmo.placement import Placement, owners_of


@dataclass(frozen=True)
class Planner:
    """Chooses a number of stages and a placement: of the present shape, on one stage a chain.

    Attributes:
        given: the input of decisions: present placement, profile and others.
        first_seconds: of the iteration that ``max_slowdown`` refers to; None before the first profile.
        find_overflow: returns the stage that lacks memory for the move to a placement; None if no stage does.
    """

    given: DecisionInput
    first_seconds: float | None
    find_overflow: Callable[[Placement], Overflow | None] = lambda _: None

    def onto(self, num_stages: int) -> Packing:
        """Partition the layers over exactly ``num_stages`` stages, no more than there are.

        Raises:
            PartitionError: more stages than groups of layers, or no partition fits in memory (names a number of stages
                that would).
        """
        try:
            return partitioners.pack_onto(self._balance, self.given.pipeline, num_stages)
        except PartitionError as error:
            more = range(num_stages + 1, self.given.placement.num_stages + 1)
            fitting = [count for count in more if self._fits(count)]
            hint = f"; {counted(fitting[0], 'stage')} would do" if fitting else ""
            raise PartitionError(f"repack onto {counted(num_stages, 'stage')}: {error}{hint}") from error

    def best(self) -> Packing:
        """Choose by ``dynmo.repack.planner``: the present partition unless a better one is found."""
        repack, present = self.given.config.repack, self._present()
        least = min(repack.min_stages, present.num_stages)
        if repack.planner == "first_fit":
            if self.given.memory is None:
                raise PartitionError('repack: planner "first_fit" packs by memory, and there is no memory_limit')
            packed = partitioners.first_fit(present.placement, self.given.memory, target=least)
            num_stages, within = packed.num_stages, math.inf
        elif self.first_seconds is None:
            return present
        else:
            margin = 1.0 - self.given.config.min_improvement  # ranks do not come back, and measurements are noisy
            num_stages, within = least, self.first_seconds / (1.0 - repack.max_slowdown) * margin
        return self._fewest(num_stages, within) or present

    def _fewest(self, least: int, within_seconds: float) -> Packing | None:
        most = self.given.placement.num_stages - 1
        return partitioners.fewest_stages(
            self._balance, self.given.pipeline, most, least=least, within_seconds=within_seconds
        )

    def _present(self) -> Packing:
        return Packing(self.given.placement, self.given.pipeline.iteration_seconds(self.given.placement))

    def _fits(self, count: int) -> bool:
        try:
            partitioners.pack_onto(self._balance, self.given.pipeline, count)
        except PartitionError:
            return False
        return True

    def _balance(self, count: int) -> Placement:
        config, profile = self.given.config, self.given.profile
        by_time = config.balance_by == "time"
        shape, pipeline = self.given.placement.shape_on(count), self.given.pipeline.on(count)
        owners = owners_of(shape, count)
        partition = partitioners.propose(
            config.balancer,
            list(pipeline.layer_seconds) if by_time else profile.costs("parameters"),
            count,
            start=partitioners.uniform(len(profile.layers), len(owners)),
            memory=self.given.memory.on(count) if self.given.memory is not None else None,
            pipeline=pipeline if by_time else None,
            speeds=None,
            groups=self.given.groups,
            owners=owners,
        )
        placement = Placement.of_shape(shape, partition, num_layers=len(profile.layers), num_stages=count)
        overflow = self.find_overflow(placement)
        if overflow is not None:
            raise PartitionError(f"going to {placement}, {overflow}")
        return placement
