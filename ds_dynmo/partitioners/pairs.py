"""The exact least bottleneck where every stage holds two chunks of layers: a V or a loop.

The stages take their chunks in turn, one layer or more each from the front of two runs of layers: the first chunk from
the start of the model, the second from its end backwards (a V), or from its middle onwards (a loop). So a partition is
a walk over pairs of positions, one step per stage, that ends where the runs meet.

For a bottleneck the search keeps every pair that the stages so far can reach and from which the rest can be held. It is
not enough to keep the furthest second position for each first one: a chunk cannot be empty, so a stage has to take the
next layer even if that is too heavy for it beside its other chunk and suits a later stage better. But that *front* is
cheap, and nearly always reaches the least bottleneck. So bisection runs on the front, and all pairs are searched just
below its result. This is exact as long as no stage has more than :data:`_STEPS` ways to go on from all pairs.

Costs are counted in whole units of 2**-52 of their sum or less, so that equal loads are equal and no sum is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners.checks import check_num_chunks
from ds_dynmo.partitioners.memory import MemoryModel, check_fits, micro_batches_held
from ds_dynmo.placement import Placement, check_partition

__all__ = ["balanced_pairs"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_CLOSE = 1 / 4096  # relative gap at which the bisection ends; what is left is found by the search of all pairs
_ROUNDING = 1e-12  # relative, of sums of squares
_MIDDLES = 3_000_000  # most middles of a loop times pairs of positions; beyond it the most even middles alone are tried
_STEPS = 2_000_000  # most ways to go on that are tried for a stage; beyond it some pairs are left out


def balanced_pairs(
    costs: Sequence[float],
    owners: Sequence[int],
    speeds: Sequence[float],
    *,
    memory: MemoryModel | None = None,
    start: Sequence[int] | None = None,
) -> list[int]:
    """Find boundaries of the smallest possible bottleneck, where a stage's load is that of both its chunks.

    Ties are broken by the least sum of squares of the chunks' costs, so that chunks are even, then for ``start``.

    Args:
        costs: per layer, checked.
        owners: per chunk, the stage that holds it: those of a V or a loop.
        speeds: per stage.
        memory: the memory model; only partitions that fit count. None: no limit.
        start: the present boundaries, which stay if they are as good.

    >>> balanced_pairs([3, 1, 1, 1, 1, 1], (0, 1, 1, 0), (1.0, 1.0))
    [0, 1, 3, 5, 6]
    >>> balanced_pairs([3, 1, 1, 1, 1, 1], (0, 1, 0, 1), (1.0, 1.0))
    [0, 1, 3, 4, 6]

    Raises:
        PartitionError: fewer layers than chunks, or no partition fits (names the stage, the bytes and the limit of one
            that balances bytes).
    """
    stages, num_layers = len(speeds), len(costs)
    check_num_chunks(num_layers, len(owners))
    if memory is not None:
        memory.check_shape(num_layers, stages)
    search = _Search(costs, owners, speeds, memory)
    even = [chunk * num_layers // (2 * stages) for chunk in range(2 * stages + 1)]
    present = None if start is None else list(check_partition(start, num_layers, len(owners)))
    known = [boundaries for boundaries in (present, even) if boundaries is not None and search.fits(boundaries)]
    best = min(known, key=search.bottleneck, default=None) or search.first_that_fits()
    if num_layers == len(owners):
        return best
    best = search.bisected(best)
    while search.bottleneck(best) > search.least:
        better = search.within(math.nextafter(search.bottleneck(best), -math.inf))
        if better is None:
            break
        best = better
    best = search.within(*search.rank(best)) or best
    return present if present in known and search.rank(present) <= search.rank(best) else best


class _Positions(NamedTuple):
    """Positions that the stages so far can reach, and how.

    Attributes:
        middle: number of the middle of a loop, 0 for a V.
        first, second: layers taken from either run.
        squares: the least sum of squares of the chunks' costs.
        before: index of the position before, in the reached ones of the stages before.
    """

    middle: Ints
    first: Ints
    second: Ints
    squares: Floats
    before: Ints


class _Search:
    """One instance: the layers as two runs, and what each stage can hold."""

    def __init__(
        self, costs: Sequence[float], owners: Sequence[int], speeds: Sequence[float], memory: MemoryModel | None
    ) -> None:
        self.stages, self.num_layers, self.memory = len(speeds), len(costs), memory
        self.speeds, self.owners = speeds, owners
        self.returns = list(owners[self.stages :]) == list(range(self.stages))[::-1]  # a V
        scale = 52 - math.frexp(math.fsum(costs))[1]
        units = np.array([round(math.ldexp(cost, scale)) for cost in costs], dtype=np.int64)
        self.prefix = np.concatenate([[0], np.cumsum(units)])
        self.total = int(self.prefix[-1])
        self.run = self.prefix if not self.returns else np.concatenate([[0], np.cumsum(units[::-1])])
        lightest, *_, heaviest = sorted(units.tolist())
        # No bottleneck is smaller: all stages are equally full, or the heaviest layer has one beside it.
        self.least = max(self.total / math.fsum(speeds), (lightest + heaviest) / max(speeds))
        self.middles = self._middles()

    def _middles(self) -> Ints:
        """List where the second run of a loop may start, nearest to half of the load first."""
        if self.returns:
            return np.zeros(1, dtype=np.int64)
        middles = np.arange(self.stages, self.num_layers - self.stages + 1)
        nearest = np.argsort(np.abs(2 * self.prefix[middles] - self.total), kind="stable")
        return middles[nearest[: max(1, _MIDDLES // (self.num_layers + 1) * (self.num_layers + 1))]]

    def loads(self, boundaries: Sequence[int]) -> list[float]:
        """Compute the load of each stage in units of cost over speed."""
        chunks = np.diff(self.prefix[list(boundaries)])
        return [
            int(chunks[[c for c, owner in enumerate(self.owners) if owner == stage]].sum()) / speed
            for stage, speed in enumerate(self.speeds)
        ]

    def bottleneck(self, boundaries: Sequence[int]) -> float:
        """Compute the largest load of a stage."""
        return max(self.loads(boundaries))

    def rank(self, boundaries: Sequence[int]) -> tuple[float, float]:
        """Return what is minimised: the bottleneck, then the squares of the chunks' costs."""
        return self.bottleneck(boundaries), float(_square(np.diff(self.prefix[list(boundaries)])).sum())

    def fits(self, boundaries: Sequence[int]) -> bool:
        """Return whether the partition is within all memory limits."""
        if self.memory is None:
            return True
        needed = self.memory.bytes_per_stage(Placement.of(boundaries, self.owners))
        return all(size <= limit for size, limit in zip(needed, self.memory.limits))

    def first_that_fits(self) -> list[int]:
        """Find a partition that fits, with the bottleneck raised step by step, because few are within a small one.

        Raises:
            PartitionError: none was found; names the stage, the bytes and the limit of the one that balances bytes.
        """
        for share in (1.05, 1.25, 2.0, 4.0, math.inf):
            found = self.within(share * max(self.least, 1.0))
            if found is not None:
                return found
        memory = self.memory
        assert memory is not None
        kept = memory.input_bytes if memory.checkpoint_interval else memory.activation_bytes
        held, *_ = micro_batches_held(self.owners, memory.micro_batches)  # the same of all chunks
        needed = [static + held * size for static, size in zip(memory.static_bytes, kept)]
        nearest = balanced_pairs(needed, self.owners, (1.0,) * self.stages)
        try:
            check_fits(Placement.of(nearest, self.owners), memory)
        except PartitionError as error:
            raise PartitionError(f"no partition fits in memory; the nearest one: {error}") from error
        return nearest

    def bisected(self, best: list[int]) -> list[int]:
        """Lower the bottleneck as far as the search along the front does."""
        low, high = self.least, self.bottleneck(best)
        while high - low > _CLOSE * high:
            bound = (low + high) / 2
            found = self.within(bound, front=True)
            if found is None:
                low = bound
            else:
                best, high = found, self.bottleneck(found)
        return best

    def within(self, bound: float, most_squares: float = math.inf, *, front: bool = False) -> list[int] | None:
        """Find a partition with a bottleneck of at most ``bound``, with the least squares; None if there is none.

        Args:
            most_squares: a partition with more squares is of no use.
            front: keep only the furthest second position of each first one. A partition may then not be found.
        """
        capacities = [_capacity(bound, self.total, speed) for speed in self.speeds]
        none = np.zeros(len(self.middles), dtype=np.int64)
        reached = [_Positions(np.arange(len(none)), none, none, none.astype(np.float64), none)]
        for stage, capacity in enumerate(capacities):
            rest = sum(capacities[stage + 1 :])
            reached.append(self._step(reached[-1], stage, capacity, rest, most_squares * (1 + _ROUNDING), front))
            if not len(reached[-1].first):
                return None
        return self._trace_back(reached)

    def _step(
        self, here: _Positions, stage: int, capacity: int, rest: int, most_squares: float, front: bool
    ) -> _Positions:
        """Let a stage take its two chunks from every reached position.

        Args:
            capacity, rest: the units of cost that this stage, and all stages after it together, may hold.
        """
        prefix, run, size, behind = self.prefix, self.run, self.num_layers, self.stages - 1 - stage
        middle = self.middles[here.middle]
        offset = 0 if self.returns else middle  # where the second run starts
        # First chunks: up to the capacity, with one layer of the other run beside it.
        room = size - here.second - 1 - 2 * behind if self.returns else middle - behind
        beside = run[offset + here.second + 1] - run[offset + here.second]
        most = np.searchsorted(prefix, prefix[here.first] + capacity - beside, "right") - 1
        least = here.first + 1 if behind or self.returns else middle  # the last stage of a loop ends at the middle
        if _are_many(least, np.minimum(most, room), here.first):
            return self._step_from_fewer(here, stage, capacity, rest, most_squares, front)
        source, first = _ranges(least, np.minimum(most, room))
        before, second, middle = here.first[source], here.second[source], middle[source]
        offset = 0 if self.returns else middle
        # Second chunks: at least what later stages cannot hold, up to the capacity; the last stage takes the rest.
        room = size - first - 2 * behind if self.returns else size - middle - behind
        load, begin = prefix[first] - prefix[before], run[offset + second]
        most = np.searchsorted(run, begin + capacity - load, "right") - 1 - offset
        goal = self.total - prefix[first] + (0 if self.returns else prefix[middle])
        least = np.searchsorted(run, goal - rest, "left") - offset if behind else room
        least, most = np.maximum(least, second + 1), np.minimum(most, room)
        if _are_many(least, most, here.first):
            return self._step_from_fewer(here, stage, capacity, rest, most_squares, front)
        place, taken = _ranges(least, most)
        end = run[(0 if self.returns else middle[place]) + taken]
        squares = here.squares[source[place]] + _square(load[place]) + _square(end - begin[place])
        # Later stages have at least the squares of equal chunks.
        useful = squares + _square(goal[place] - end) / max(2 * behind, 1) <= most_squares
        if self.memory is not None:
            second_chunk = self._second_chunk(middle[place], second[place], taken)
            useful &= self._fit(stage, (before[place], first[place]), second_chunk)
        place, taken, squares = place[useful], taken[useful], squares[useful]
        source, first = source[place], first[place]
        key = here.middle[source] * (size + 1) + first
        if front:
            best = self._least_of_each(key, -taken.astype(np.float64))
        else:
            best = self._least_of_each(key * (size + 1) + taken, squares)
        return _Positions(here.middle[source[best]], first[best], taken[best], squares[best], source[best])

    def _step_from_fewer(
        self, here: _Positions, stage: int, capacity: int, rest: int, most_squares: float, front: bool
    ) -> _Positions:
        """Step from the furthest second position of each first one alone; if these are all, from every other one."""
        kept = self._least_of_each(here.middle * (self.num_layers + 1) + here.first, -here.second.astype(np.float64))
        kept = kept[::2] if len(kept) == len(here.first) else kept
        middle, first, second, squares, before = here
        fewer = _Positions(middle[kept], first[kept], second[kept], squares[kept], before[kept])
        after = self._step(fewer, stage, capacity, rest, most_squares, front)
        return after._replace(before=kept[after.before])

    def _least_of_each(self, keys: Ints, values: Floats) -> Ints:
        """Return where the least value of each key is; of equal ones the last."""
        least, chosen = self._by_key
        np.minimum.at(least, keys, values)
        winners = np.flatnonzero(values == least[keys])
        chosen[keys[winners]] = winners
        least[keys] = np.inf
        last: Ints = winners[chosen[keys[winners]] == winners]
        return last

    @cached_property
    def _by_key(self) -> tuple[Floats, Ints]:
        """Memory of :meth:`_least_of_each`, which is left as it was."""
        keys = len(self.middles) * (self.num_layers + 1) * (self.num_layers + 1)
        return np.full(keys, np.inf), np.zeros(keys, dtype=np.int64)

    def _second_chunk(self, middle: Ints, second: Ints, taken: Ints) -> tuple[Ints, Ints]:
        """Return the first layers of second chunks, and the layers after their last ones."""
        if self.returns:
            return self.num_layers - taken, self.num_layers - second
        return middle + second, middle + taken

    def _fit(self, stage: int, first: tuple[Ints, Ints], second: tuple[Ints, Ints]) -> npt.NDArray[np.bool_]:
        """Mark the pairs of chunks that fit on ``stage``."""
        assert self.memory is not None
        chunks = [chunk for chunk, owner in enumerate(self.owners) if owner == stage]
        held = micro_batches_held(self.owners, self.memory.micro_batches)
        needed = self.memory.bytes_of_chunks([first, second], [held[chunk] for chunk in chunks])
        fits: npt.NDArray[np.bool_] = needed <= self.memory.limits[stage]
        return fits

    def _trace_back(self, reached: list[_Positions]) -> list[int]:
        """Return the boundaries of the partition whose last position has the least squares."""
        place = int(reached[-1].squares.argmin())
        middle = self.middles[reached[-1].middle[place]]
        firsts, seconds = [], []
        for here in reversed(reached):
            firsts.append(int(here.first[place]))
            seconds.append(int(self.num_layers - here.second[place] if self.returns else middle + here.second[place]))
            place = here.before[place]
        return [*firsts[::-1], *(seconds[1:] if self.returns else seconds[-2::-1])]


def _capacity(bound: float, total: int, speed: float) -> int:
    """Return the most units of which a stage's load is at most ``bound``, rounded as loads are."""
    units = total if bound >= total / speed else math.floor(bound * speed)
    while units / speed > bound:
        units -= 1
    while units < total and (units + 1) / speed <= bound:
        units += 1
    return units


def _square(units: Ints) -> Floats:
    exact = units.astype(np.float64)
    return exact * exact


def _are_many(least: Ints, most: Ints, positions: Ints) -> bool:
    """Return whether the values from ``least`` to ``most`` are too many to be tried, of more than one position."""
    return len(positions) > 1 and int(np.maximum(most - least + 1, 0).sum()) > _STEPS


def _ranges(least: Ints, most: Ints) -> tuple[Ints, Ints]:
    """List all values from ``least`` to ``most``, and the place of the range of each."""
    counts = np.maximum(most - least + 1, 0)
    place = np.repeat(np.arange(len(counts)), counts)
    return place, np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts) + least[place]
