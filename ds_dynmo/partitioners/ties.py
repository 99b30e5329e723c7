"""Tie-breaking among partitions of least bottleneck: by least imbalance, then by fewest bytes moved.

Their bottleneck and mean load are equal, so the paper's imbalance (equation 2) is least if the load of the lightest
stage is largest. Loads are exact integers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ds_dynmo.errors import PartitionError

__all__ = [
    "Limits",
    "check_layer_bytes",
    "even_out",
    "evenest",
    "fewest_moved",
    "lightest_loads",
]


def check_layer_bytes(layer_bytes: Sequence[int] | None, num_layers: int) -> Sequence[int]:
    """Return ``layer_bytes``, or 1 per layer if they are unknown.

    Raises:
        PartitionError: not one per layer.
    """
    if layer_bytes is None:
        return (1,) * num_layers
    if len(layer_bytes) != num_layers:
        raise PartitionError(f"{num_layers} layers need {num_layers} sizes in bytes, got {len(layer_bytes)}")
    return layer_bytes


@dataclass(frozen=True)
class Limits:
    """The limits of each stage's layers.

    Attributes:
        prefix: exact prefix sums of the layers' costs.
        slowness: per stage, the time of a unit of cost.
        bound: the largest load of a stage.
        furthest: per stage and first layer, the furthest stop that fits in memory; None: no limit.
    """

    prefix: list[int]
    slowness: Sequence[int]
    bound: int
    furthest: Sequence[Sequence[int]] | None = None

    def load(self, stage: int, start: int, stop: int) -> int:
        """Compute the load of layers ``[start, stop)`` on ``stage``."""
        return self.slowness[stage] * (self.prefix[stop] - self.prefix[start])

    def lightest(self, partition: Sequence[int]) -> int:
        """Compute the smallest load of a stage."""
        return min(self.load(stage, *partition[stage : stage + 2]) for stage in range(len(partition) - 1))

    def met(self, partition: Sequence[int], floor: int) -> bool:
        """Return whether every stage fits and has a load from ``floor`` to the bound."""
        return all(
            stop in self.stops(stage, start, floor) for stage, (start, stop) in enumerate(zip(partition, partition[1:]))
        )

    def stops(self, stage: int, start: int, floor: int) -> range:
        """Return the possible stops of ``stage`` if it starts at ``start`` and has a load of at least ``floor``."""
        prefix, slow = self.prefix, self.slowness[stage]
        first = bisect_left(prefix, prefix[start] - (-floor // slow), start + 1)
        last = bisect_right(prefix, prefix[start] + self.bound // slow, start) - 1
        return range(first, min(last, self.furthest[stage][start]) + 1 if self.furthest is not None else last + 1)

    def ends(self, floor: int) -> list[range]:
        """Return, per stage, the stops with which later stages can share the rest, with at least ``floor`` each."""
        num_layers, total = len(self.prefix) - 1, self.prefix[-1]
        most = _sums_behind([self.bound // slow for slow in self.slowness])
        least = _sums_behind([-(-floor // slow) for slow in self.slowness])
        ends = []
        for stages_behind, (some, others) in enumerate(zip(most, least)):
            last = min(num_layers - stages_behind, bisect_right(self.prefix, total - others) - 1)
            ends.append(range(bisect_left(self.prefix, total - some), last + 1))
        return ends[::-1]


def _sums_behind(numbers: Sequence[int]) -> list[int]:
    """Sum the last 0, 1, 2, ... of ``numbers``, but never the first one."""
    return list(accumulate(reversed(numbers[1:]), initial=0))


def lightest_loads(limits: Limits, floor: int) -> list[dict[int, int]]:
    """Compute, per number of stages and boundary after them, the largest possible load of the lightest of them.

    Args:
        floor: a load that some partition gives every stage; boundaries that need a smaller load are left out.
    """
    prefix = limits.prefix
    reached = [{0: limits.bound}]
    for stage, ends in enumerate(limits.ends(floor)):
        slow, after = limits.slowness[stage], dict[int, int]()
        for start, lightest in reached[-1].items():
            before, stops = prefix[start], limits.stops(stage, start, floor)
            for stop in range(max(stops.start, ends.start), min(stops.stop, ends.stop)):
                load = slow * (prefix[stop] - before)
                if load > lightest:
                    load = lightest
                if load > after.get(stop, -1):
                    after[stop] = load
        reached.append(after)
    return reached


def evenest(limits: Limits, reached: Sequence[dict[int, int]], floor: int) -> list[int]:
    """Choose boundaries nearest to an even share, from the last to the first, with loads of at least ``floor``.

    Args:
        reached: the result of :func:`lightest_loads`.
    """
    prefix, num_stages = limits.prefix, len(limits.slowness)
    partition = [0] * num_stages + [len(prefix) - 1]
    for stage in range(num_stages - 1, 0, -1):
        stop = partition[stage + 1]
        starts = (start for start, lightest in reached[stage].items() if lightest >= floor and start < stop)
        candidates = [start for start in starts if stop in limits.stops(stage, start, floor)]
        share = prefix[stop] * stage
        partition[stage] = min(candidates, key=lambda start: abs(prefix[start] * (stage + 1) - share))
    return partition


def fewest_moved(limits: Limits, floor: int, start: Sequence[int], layer_bytes: Sequence[int]) -> list[int]:
    """Find the partition to which fewest bytes move from ``start``, with loads of at least ``floor``. One must exist.

    Args:
        layer_bytes: per layer, the bytes that move with it.
    """
    sizes = [0, *accumulate(layer_bytes)]
    kept = {0: 0}  # per boundary after the stages so far: the most bytes that stay
    starts: list[dict[int, int]] = []  # per stage and stop: its start
    for stage, ends in enumerate(limits.ends(floor)):
        old_start, old_stop = start[stage : stage + 2]
        after: dict[int, int] = {}
        chosen: dict[int, int] = {}
        for first, so_far in kept.items():
            before = sizes[max(first, old_start)]
            stops = limits.stops(stage, first, floor)
            for stop in range(max(stops.start, ends.start), min(stops.stop, ends.stop)):
                stay = so_far + max(0, sizes[min(stop, old_stop)] - before)
                if stay > after.get(stop, -1):
                    after[stop], chosen[stop] = stay, first
        kept = after
        starts.append(chosen)
    boundaries = [len(limits.prefix) - 1]
    for chosen in reversed(starts):
        boundaries.append(chosen[boundaries[-1]])
    return boundaries[::-1]


def even_out(prefix: list[int], partition: list[int], fits: Callable[[int, int, int], bool] | None = None) -> list[int]:
    """Move each inner boundary, in turn, to minimise the heavier load of the two stages beside it.

    No stage becomes heavier than the heavier of its pair was, nor lighter than the lighter one.

    Args:
        prefix: exact prefix sums of the layers' costs.
        fits: ``fits(stage, start, stop)`` is True if the layers fit in memory; None: all do.

    >>> even_out([0, 10, 11, 12, 13, 14], [0, 1, 2, 5])
    [0, 1, 3, 5]
    """
    partition = [*partition]
    num_stages = len(partition) - 1
    for _ in range(num_stages):
        before = [*partition]
        for stage in range(1, num_stages):
            start, boundary, stop = partition[stage - 1 : stage + 2]
            boundary = _even_boundary(prefix, start, boundary, stop)
            if fits is None or (fits(stage - 1, start, boundary) and fits(stage, boundary, stop)):
                partition[stage] = boundary
        if partition == before:
            break
    return partition


def _even_boundary(prefix: list[int], start: int, boundary: int, stop: int) -> int:
    """Find the boundary that minimises the heavier load of two neighbours; among equals ``boundary``."""
    low, high = prefix[start], prefix[stop]
    # From the middle on, the left stage is the heavier one; before it, the right one.
    right = bisect_left(prefix, -(-(low + high) // 2), start + 1, stop - 1)
    left = max(right - 1, start + 1)
    best, heaviest = boundary, max(prefix[boundary] - low, high - prefix[boundary])
    for place in (left, right):
        heavier = max(prefix[place] - low, high - prefix[place])
        if heavier < heaviest:
            best, heaviest = place, heavier
    return best
