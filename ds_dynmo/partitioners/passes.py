"""Orders of passes for any placement: the shortest known or found one.

Orders are cached and the work of searches is counted, because a decision evaluates many partitions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_dynmo.errors import ScheduleError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners.layer_passes import LayerPasses
from ds_dynmo.partitioners.memory import micro_batches_held
from ds_dynmo.partitioners.metrics import Partitions, sums_of_stages
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import (
    FoundSchedule,
    PassBytes,
    PassCosts,
    Schedule,
    best_schedule,
    lower_bound,
    lower_bounds,
    one_f_one_b_limit,
    peak_bytes,
    period_seconds,
    schedule_for_equal_costs,
    shortest_period,
)
from ds_dynmo.schedules.order import run

__all__ = ["PassModel"]

Floats = npt.NDArray[np.float64]
_CLOSE = 1.002  # over the bound; a known order below it is not searched again
_AS_GOOD = 1.01  # over its ratio to the bound when it was searched; a known order below it is not searched again
_FAR = 1.1  # over the bound; above it an order is searched even without work left
_SEARCH = 6  # actions that a search counts as, per pass of an iteration
_REPLAY = 0.5  # actions that a replay counts as, per pass of an iteration


class _Chunks(NamedTuple):
    """The chunks of a placement.

    Attributes:
        bound_seconds: a lower bound of the iteration.
        least_seconds: a lower bound of the seconds that count: of the period if batches overlap, else the iteration.
    """

    costs: PassCosts
    sizes: PassBytes
    limits: tuple[int, ...]
    bound_seconds: float
    least_seconds: float


@dataclass(frozen=True)
class PassModel:
    """Finds orders of passes for placements on as many stages as there are speeds.

    Attributes:
        layers: seconds and bytes of each layer's passes.
        micro_batches: per iteration.
        speeds: per stage; a layer takes its seconds over the stage's speed.
        link_seconds: of a message between stages.
        memory: limit of the passes of a stage, as a multiple of the bytes of the largest stage under 1F1B.
        limit_bytes: that a stage may use, its layers included; None: no limit.
        may_stay: DeepSpeed's 1F1B may be chosen if nothing is shorter.
        back_to_back: the first stages start a batch before the last ones end the one before.
        in_force: the order that runs now; no other is searched if it can hardly be improved; None: unknown.
        in_force_over_bound: as in a :class:`FoundSchedule`.
        search_actions: limit of the actions that all searches simulate. A search that is needed for any order, or for
            an order near its bound, runs even beyond it.
        min_gain: share of the present iteration that another partition has to save.
    """

    layers: LayerPasses
    micro_batches: int
    speeds: tuple[float, ...]
    link_seconds: float = 0.0
    memory: float = 1.0
    limit_bytes: int | None = None
    may_stay: bool = False
    back_to_back: bool = False
    in_force: Schedule | None = None
    in_force_over_bound: float = 0.0
    search_actions: float = math.inf
    min_gain: float = 0.0

    def on(self, num_stages: int) -> PassModel:
        """Return a model of ``num_stages`` stages of speed 1."""
        return replace(self, speeds=(1.0,) * num_stages)

    def folded(self, groups: LayerGroups) -> PassModel:
        """Return a model whose placements are of ``groups``."""
        return replace(self, layers=self.layers.folded(groups))

    def shortest(self, placement: Placement) -> FoundSchedule | None:
        """Find the shortest order under ``placement``, or None if none fits. Results are cached."""
        if placement not in self._known:
            self._known[placement] = self._shortest(placement)
        return self._known[placement]

    def _shortest(self, placement: Placement) -> FoundSchedule | None:
        here, owners = self._chunks(placement), placement.owners
        known = self._known_orders(placement, here)
        present = min(known, key=lambda schedule: self._counted_seconds(schedule, here), default=None)
        if present is not None:
            over = self._counted_seconds(present, here) / here.least_seconds
            known_here = over <= _FAR or present.schedule == self.in_force  # else it may suit other chunks only
            close = over <= max(_CLOSE, present.over_bound * _AS_GOOD if known_here else 0.0)
            if close or (over <= _FAR and not self.can_search(owners)):
                return present
        start = present.schedule.orders if present is not None else None
        self._work.append(_SEARCH * self.num_passes(owners))
        try:
            found = best_schedule(
                here.costs, self.micro_batches, here.sizes, here.limits, start=start, back_to_back=self.back_to_back
            )
        except ScheduleError:
            return None
        seconds = self._counted_seconds(found, here)
        if present is not None and seconds >= self._counted_seconds(present, here):
            return replace(present, over_bound=over)
        found = replace(found, over_bound=seconds / here.least_seconds)
        self._orders.append((found.schedule, found.over_bound))
        return found

    def for_equal_costs(self, placement: Placement) -> Schedule:
        """Return the order that a V or loop runs where no order fits: :func:`schedule_for_equal_costs`."""
        return schedule_for_equal_costs(
            placement.num_stages,
            self.micro_batches,
            self.memory,
            shape=placement.shape,
            back_to_back=self.back_to_back,
        )

    def can_search(self, owners: Sequence[int]) -> bool:
        """Return whether enough is left of ``search_actions`` for a search with chunks of these owners."""
        return self._actions_left >= _SEARCH * self.num_passes(owners)

    def affordable_replays(self, owners: Sequence[int]) -> int:
        """Count the partitions that may be replayed under all known orders, with enough left for one search."""
        if self.search_actions == math.inf:
            return sys.maxsize
        left = self._actions_left / self.num_passes(owners) - _SEARCH
        return max(0, int(left / (_REPLAY * max(1, len(self._orders)))))

    def num_passes(self, owners: Sequence[int]) -> int:
        """Count the passes of an iteration, if all backward passes are split."""
        return 3 * len(owners) * self.micro_batches

    @property
    def _actions_left(self) -> float:
        return self.search_actions - sum(self._work)

    def known_seconds(self, placement: Placement) -> float:
        """Simulate ``placement`` under the known orders, and return the seconds of the shortest."""
        known = self._known_orders(placement, self._chunks(placement))
        return min((found.iteration_seconds for found in known), default=math.inf)

    def _known_orders(self, placement: Placement, here: _Chunks) -> list[FoundSchedule]:
        """Replay the known orders under ``placement``; leave out those for other owners and those that do not fit."""
        replayed = self._replays.setdefault(placement, [])
        replayed += [self._replayed(order, over_bound, here) for order, over_bound in self._orders[len(replayed) :]]
        return [found for found in replayed if found is not None]

    def _chunks(self, placement: Placement) -> _Chunks:
        costs, sizes, limits = self.costs(placement), self.layers.sizes(placement), self.limits(placement)
        bound = lower_bound(costs, self.micro_batches, sizes, limits)
        least = shortest_period(costs, self.micro_batches, sizes, limits) if self.back_to_back else bound
        return _Chunks(costs, sizes, limits, bound, least or 1.0)

    def _counted_seconds(self, found: FoundSchedule, here: _Chunks) -> float:
        """Return the seconds that count: of a batch alone, or from one batch to the next if batches overlap."""
        if not self.back_to_back:
            return found.iteration_seconds
        return period_seconds(found.schedule.orders, found.schedule.micro_batches, here.costs)

    def _replayed(self, order: Schedule, over_bound: float, here: _Chunks) -> FoundSchedule | None:
        """Simulate a known order on these chunks; None if it is for other owners or does not fit."""
        if (order.owners, order.micro_batches) != (here.costs.owners, self.micro_batches):
            return None
        if any(here.costs.weight_gradient_seconds[chunk] == 0 for chunk in order.split_chunks):
            return None  # splitting them gains nothing
        self._work.append(_REPLAY * self.num_passes(order.owners))
        peaks = peak_bytes(order, here.sizes)
        if any(peak > limit for peak, limit in zip(peaks, here.limits)):
            return None
        seconds = max(run(order.orders, order.micro_batches, here.costs).done)
        return FoundSchedule(order, seconds, here.bound_seconds, peaks, over_bound=over_bound)

    def lower_bounds(self, partitions: Partitions, owners: Sequence[int]) -> Floats:
        """Bound the iterations of many partitions from below, whatever their orders.

        Args:
            partitions: boundaries, a column each.
            owners: per chunk, the stage that holds it.
        """
        forward, first, second, whole = self.layers.seconds_of_many(partitions, owners, self.speeds)
        links: list[Any] = self.layers.links_of_many(partitions, owners, self.link_seconds)
        in_flight = self._in_flight(partitions, owners)
        return lower_bounds(owners, forward, first, second, whole, self.micro_batches, links, in_flight)

    def costs(self, placement: Placement) -> PassCosts:
        """Sum the seconds of passes per chunk."""
        return self.layers.costs(placement, self.speeds, self.link_seconds)

    def limits(self, placement: Placement) -> tuple[int, ...]:
        """Return the bytes that the passes of each stage may hold."""
        sizes = self.layers.sizes(placement)
        limits = one_f_one_b_limit(sizes, self.micro_batches, self.memory, owners=placement.owners)
        if self.limit_bytes is None:
            return limits
        left = (self.limit_bytes - static for static in self.layers.static_of_stages(placement))
        return tuple(map(min, limits, left))

    def _in_flight(self, partitions: Partitions, owners: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """Count the micro-batches for which each chunk has memory; None under checkpointing: no bound."""
        if self.layers.checkpoint_interval:
            return None
        activations, static = self.layers.bytes_of_many(partitions)
        held = np.array(micro_batches_held(owners, self.micro_batches))[:, None] * activations
        limits = np.broadcast_to(np.floor(self.memory * sums_of_stages(held, owners).max(axis=0)), held.shape)
        if self.limit_bytes is not None:
            limits = np.minimum(limits, (self.limit_bytes - sums_of_stages(static, owners))[list(owners)])
        fitting = np.where(activations > 0, limits // np.maximum(activations, 1), self.micro_batches)
        return np.clip(fitting, 1, self.micro_batches).astype(np.int64)

    @cached_property
    def _orders(self) -> list[tuple[Schedule, float]]:
        """The known orders, each with its seconds over the bound when it was searched."""
        return [] if self.in_force is None else [(self.in_force, self.in_force_over_bound)]

    @cached_property
    def _replays(self) -> dict[Placement, list[FoundSchedule | None]]:
        """By placement, the replays of known orders so far."""
        return {}

    @cached_property
    def _work(self) -> list[float]:
        return []

    @cached_property
    def _known(self) -> dict[Placement, FoundSchedule | None]:
        return {}
