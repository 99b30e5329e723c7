"""Passes under split schedules, for any partition: their seconds, their bytes and their order.

Seconds and bytes per layer become those of stages, as :mod:`ds_dynmo.schedules` needs them. Orders are cached and the
work of searches is counted, because a decision evaluates many partitions.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_dynmo.errors import ScheduleError
from ds_dynmo.partitioners.memory import kept_bytes
from ds_dynmo.partitioners.metrics import Partitions, sums_of_many
from ds_dynmo.schedules import (
    FoundSchedule,
    PassBytes,
    PassCosts,
    Schedule,
    best_schedule,
    in_flight,
    lower_bound,
    lower_bounds,
    one_f_one_b_limit,
    peak_bytes,
    period_seconds,
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


class _Stages(NamedTuple):
    """The stages of a partition, each as one chunk.

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
    """Seconds and bytes of each layer if backward passes may run in two parts, with one chunk of layers per stage.

    Attributes:
        forward_seconds, input_gradient_seconds, weight_gradient_seconds, backward_seconds: per layer and micro-batch,
            on a stage of speed 1. If a layer's backward pass cannot be split, all of it is in the first part.
        static_bytes: per layer: weights, gradients, optimizer state, buffers.
        activation_bytes, input_bytes: per layer and micro-batch, as in a :class:`MemoryModel`.
        deferred_bytes: per layer and micro-batch, held from the first part of a backward pass to the second.
        micro_batches: per iteration.
        speeds: per stage; a layer takes its seconds over the stage's speed.
        frozen_layers: number of leading layers without trainable parameters.
        checkpoint_interval: layers per checkpointed segment, 0 without checkpointing.
        memory: limit of the passes of a stage, as a multiple of the bytes of the largest stage under 1F1B.
        limit_bytes: that a stage may use, its layers included; None: no limit.
        may_stay: DeepSpeed's 1F1B may be chosen if nothing is shorter.
        back_to_back: the first stages start a batch before the last ones end the one before.
        first_layers: if groups of layers count as layers, the first layer of each, then the number of layers; ():
            partitions are of layers.
        output_bytes: per layer and micro-batch; (): unknown.
        in_force: the order that runs now; no other is searched if it can hardly be improved; None: unknown.
        in_force_over_bound: as in a :class:`FoundSchedule`.
        search_actions: limit of the actions that all searches simulate. A search that is needed for any order, or for
            an order near its bound, runs even beyond it.
        min_gain: share of the present iteration that another partition has to save.
    """

    forward_seconds: tuple[float, ...]
    input_gradient_seconds: tuple[float, ...]
    weight_gradient_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    static_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    input_bytes: tuple[int, ...]
    deferred_bytes: tuple[int, ...]
    micro_batches: int
    speeds: tuple[float, ...]
    frozen_layers: int = 0
    checkpoint_interval: int = 0
    memory: float = 1.0
    limit_bytes: int | None = None
    may_stay: bool = False
    back_to_back: bool = False
    first_layers: tuple[int, ...] = ()
    output_bytes: tuple[int, ...] = ()
    in_force: Schedule | None = None
    in_force_over_bound: float = 0.0
    search_actions: float = math.inf
    min_gain: float = 0.0

    def on(self, num_stages: int) -> PassModel:
        """Return a model of ``num_stages`` stages of speed 1."""
        return replace(self, speeds=(1.0,) * num_stages)

    def shortest(self, partition: Sequence[int]) -> FoundSchedule | None:
        """Find the shortest order under ``partition``, or None if none fits. Results are cached."""
        key = tuple(map(int, partition))
        if key not in self._known:
            self._known[key] = self._shortest(key)
        return self._known[key]

    def _shortest(self, partition: tuple[int, ...]) -> FoundSchedule | None:
        here = self._stages(partition)
        known = self._known_orders(partition, here)
        present = min(known, key=lambda schedule: self._counted_seconds(schedule, here), default=None)
        if present is not None:
            over = self._counted_seconds(present, here) / here.least_seconds
            close = over <= max(_CLOSE, present.over_bound * _AS_GOOD)
            if close or (over <= _FAR and not self.can_search):
                return present
        start = present.schedule.orders if present is not None else None
        self._work.append(_SEARCH * self.num_passes)
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

    @property
    def can_search(self) -> bool:
        """Whether enough is left of ``search_actions`` for a search."""
        return self._actions_left >= _SEARCH * self.num_passes

    @property
    def affordable_replays(self) -> int:
        """The number of partitions that may be replayed under all known orders, with enough left for one search."""
        if self.search_actions == math.inf:
            return sys.maxsize
        left = self._actions_left / self.num_passes - _SEARCH
        return max(0, int(left / (_REPLAY * max(1, len(self._orders)))))

    @property
    def num_passes(self) -> int:
        """The number of passes of an iteration, if all backward passes are split."""
        return 3 * len(self.speeds) * self.micro_batches

    @property
    def _actions_left(self) -> float:
        return self.search_actions - sum(self._work)

    def known_seconds(self, partition: Sequence[int]) -> float:
        """Simulate ``partition`` under the known orders, and return the seconds of the shortest."""
        key = tuple(map(int, partition))
        known = self._known_orders(key, self._stages(key))
        return min((found.iteration_seconds for found in known), default=math.inf)

    def _known_orders(self, partition: tuple[int, ...], here: _Stages) -> list[FoundSchedule]:
        """Replay the known orders under ``partition``; leave out those for other stages and those that do not fit."""
        replayed = self._replays.setdefault(partition, [])
        replayed += [self._replayed(order, over_bound, here) for order, over_bound in self._orders[len(replayed) :]]
        return [found for found in replayed if found is not None]

    def _stages(self, partition: Sequence[int]) -> _Stages:
        costs, sizes, limits = self.costs(partition), self.sizes(partition), self.limits(partition)
        bound = lower_bound(costs, self.micro_batches, sizes, limits)
        least = shortest_period(costs, self.micro_batches, sizes, limits) if self.back_to_back else bound
        return _Stages(costs, sizes, limits, bound, least or 1.0)

    def _counted_seconds(self, found: FoundSchedule, here: _Stages) -> float:
        """Return the seconds that count: of a batch alone, or from one batch to the next if batches overlap."""
        if not self.back_to_back:
            return found.iteration_seconds
        return period_seconds(found.schedule.orders, found.schedule.micro_batches, here.costs)

    def _replayed(self, order: Schedule, over_bound: float, here: _Stages) -> FoundSchedule | None:
        """Simulate a known order on these stages; None if it is for other stages or does not fit."""
        if (order.owners, order.micro_batches) != (here.costs.owners, self.micro_batches):
            return None
        if any(here.costs.weight_gradient_seconds[chunk] == 0 for chunk in order.split_chunks):
            return None  # splitting them gains nothing
        self._work.append(_REPLAY * self.num_passes)
        peaks = peak_bytes(order, here.sizes)
        if any(peak > limit for peak, limit in zip(peaks, here.limits)):
            return None
        seconds = max(run(order.orders, order.micro_batches, here.costs).done)
        return FoundSchedule(order, seconds, here.bound_seconds, peaks, over_bound=over_bound)

    @property
    def least_seconds(self) -> tuple[float, ...]:
        """Per layer, the least seconds of a micro-batch, with the backward pass in one part or two, none if frozen."""
        whole = (
            min(backward, first + second) if layer >= self.frozen_layers else 0.0
            for layer, (first, second, backward) in enumerate(
                zip(self.input_gradient_seconds, self.weight_gradient_seconds, self.backward_seconds)
            )
        )
        return tuple(forward + backward for forward, backward in zip(self.forward_seconds, whole))

    def lower_bounds(self, partitions: Partitions) -> Floats:
        """Bound the iterations of many partitions from below, whatever their orders."""
        partitions = self._in_layers(partitions)
        goes_back = partitions[1:] > self.frozen_layers
        speeds = np.asarray(self.speeds)[:, None]
        forward, *backward = (sums_of_many(seconds, partitions) / speeds for seconds in self._seconds)
        first, second, whole = (seconds * goes_back for seconds in backward)
        owners, in_flight = range(len(self.speeds)), self._in_flight(partitions)
        return lower_bounds(owners, forward, first, second, whole, self.micro_batches, in_flight=in_flight)

    def costs(self, partition: Sequence[int]) -> PassCosts:
        """Sum the seconds of passes per stage."""
        stages = self._runs(partition)
        goes_back = [stop > self.frozen_layers for _, stop in stages]
        forward, *backward = (
            [math.fsum(seconds[start:stop]) / speed for (start, stop), speed in zip(stages, self.speeds)]
            for seconds in self._seconds
        )
        first, second, whole = ([value * back for value, back in zip(seconds, goes_back)] for seconds in backward)
        return PassCosts.chain(forward, first, second, whole, frozen_chunks=goes_back.count(False))

    def sizes(self, partition: Sequence[int]) -> PassBytes:
        """Sum the bytes of passes per stage."""
        activations, held, recomputed, split_recomputed = [], [], [], []
        for start, stop in self._runs(partition):
            kept = kept_bytes(self.activation_bytes[start:stop], self.input_bytes[start:stop], self.checkpoint_interval)
            deferred = self.deferred_bytes[start:stop]
            with_held = (size + sum(deferred[end:]) for end, size in kept.segments)
            activations.append(kept.per_micro_batch)
            held.append(sum(deferred))
            recomputed.append(kept.recomputed)
            split_recomputed.append(max(with_held, default=0))
        return PassBytes(tuple(activations), tuple(held), tuple(recomputed), tuple(split_recomputed))

    def sizes_with_messages(self, partition: Sequence[int], standing: int) -> PassBytes:
        """Sum the bytes of passes per stage and of messages between stages, which ``memory`` and limits do not count.

        From the forward to the backward pass a stage keeps the received activations, besides the copy for its first
        layer.

        Args:
            standing: number of messages per boundary and direction with buffers all the time.
        """
        stages = self._runs(partition)
        arriving = [0, *(self.input_bytes[start] for start, _ in stages[1:]), 0]
        bare = self.sizes(partition)
        return replace(
            bare,
            activation_bytes=tuple(map(sum, zip(bare.activation_bytes, arriving))),
            standing_bytes=tuple(standing * (before + after) for before, after in itertools.pairwise(arriving)),
        )

    def limits(self, partition: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes that the passes of each stage may hold."""
        limits = one_f_one_b_limit(self.sizes(partition), self.micro_batches, self.memory)
        if self.limit_bytes is None:
            return limits
        left = (self.limit_bytes - sum(self.static_bytes[start:stop]) for start, stop in self._runs(partition))
        return tuple(map(min, limits, left))

    def _in_flight(self, partitions: Partitions) -> npt.NDArray[np.int64] | None:
        """Count the micro-batches for which each stage has memory; None under checkpointing: no bound."""
        if self.checkpoint_interval:
            return None
        stages = len(self.speeds)
        activations = sums_of_many(self.activation_bytes, partitions)
        counts = [in_flight(stage, stages, self.micro_batches) for stage in range(stages)]
        under_1f1b = np.array(counts)[:, None] * activations
        limits = np.broadcast_to(np.floor(self.memory * under_1f1b.max(axis=0)), activations.shape)
        if self.limit_bytes is not None:
            limits = np.minimum(limits, self.limit_bytes - sums_of_many(self.static_bytes, partitions))
        fitting = np.where(activations > 0, limits // np.maximum(activations, 1), self.micro_batches)
        return np.clip(fitting, 1, self.micro_batches).astype(np.int64)

    @property
    def _seconds(self) -> tuple[tuple[float, ...], ...]:
        return (
            self.forward_seconds,
            self.input_gradient_seconds,
            self.weight_gradient_seconds,
            self.backward_seconds,
        )

    @cached_property
    def _orders(self) -> list[tuple[Schedule, float]]:
        """The known orders, each with its seconds over the bound when it was searched."""
        return [] if self.in_force is None else [(self.in_force, self.in_force_over_bound)]

    @cached_property
    def _replays(self) -> dict[tuple[int, ...], list[FoundSchedule | None]]:
        """By partition, the replays of known orders so far."""
        return {}

    @cached_property
    def _work(self) -> list[float]:
        return []

    @cached_property
    def _known(self) -> dict[tuple[int, ...], FoundSchedule | None]:
        return {}

    def _runs(self, partition: Sequence[int]) -> list[tuple[int, int]]:
        """Return the layers ``(start, stop)`` of each stage."""
        return list(itertools.pairwise(self._in_layers(np.asarray(partition)).tolist()))

    def _in_layers(self, partitions: Partitions) -> Partitions:
        return np.asarray(self.first_layers)[partitions] if self.first_layers else partitions
