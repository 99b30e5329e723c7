"""The exact optimum among the partitions that fit in memory, and among stages of different speeds.

Filling stages greedily is not exact here: a stage's limit depends on its place (early stages hold more
micro-batches, slow ones have less time), so layers may fit only late, and no stage may be empty. So each
probe keeps, for every stage, the whole set of boundaries that some legal choice of the stages before can reach.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners.even_out import even_out
from ds_dynmo.partitioners.memory import MemoryModel, check_fits

__all__ = ["balanced_within"]

Stops = npt.NDArray[np.int64]


def balanced_within(
    prefix: list[int], num_stages: int, memory: MemoryModel | None, start: list[int] | None, slowness: list[int]
) -> list[int]:
    """The partition of least bottleneck that fits; ``start`` if it is one.

    Args:
        prefix: exact prefix sums of the layers' costs.
        slowness: per stage, what a unit of cost takes there.

    Raises:
        PartitionError: none fits; says the stage, the bytes and the limit of the one that overshoots least.
    """
    num_layers = len(prefix) - 1
    if memory is not None:
        memory.check_shape(num_layers, num_stages)
    room = [np.full(num_layers + 1, num_layers)] * num_stages if memory is None else _room(memory)
    largest = max(b - a for a, b in zip(prefix, prefix[1:]))
    low = max(-(-prefix[-1] * min(slowness) // num_stages), largest * min(slowness))
    high = prefix[-1] * max(slowness)
    best = _probe(prefix, slowness, room, high)
    if best is None:
        assert memory is not None
        raise _none_fits(prefix, memory)
    high = _bottleneck(prefix, slowness, best)
    while low < high:
        middle = (low + high) // 2
        bounds = _probe(prefix, slowness, room, middle)
        if bounds is None:
            low = middle + 1
        else:
            best, high = bounds, _bottleneck(prefix, slowness, bounds)
    if start is not None and _bottleneck(prefix, slowness, start) == high and _fits(memory, start):
        return start
    if len(set(slowness)) > 1:
        return best
    return even_out(prefix, best, None if memory is None else memory.fits)


def _room(memory: MemoryModel, extra_bytes: int = 0) -> list[Stops]:
    """Per stage and first layer, how far the stage may reach."""
    return [np.array(memory.furthest_stops(stage, extra_bytes)) for stage in range(len(memory.limits))]


def _probe(prefix: list[int], slowness: list[int], room: list[Stops], bound: int) -> list[int] | None:
    """A partition that fits and whose stages all take at most ``bound``, or None."""
    under = {
        slow: np.array([bisect_right(prefix, before + bound // slow, lo=at) - 1 for at, before in enumerate(prefix)])
        for slow in set(slowness)
    }
    stops = [np.minimum(under[slow], furthest) for slow, furthest in zip(slowness, room)]
    reached = [np.arange(len(prefix)) == 0]
    for stage_stops in stops:
        reached.append(_reach(reached[-1], stage_stops))
    if not reached[-1][-1]:
        return None
    return _trace_back(prefix, reached, stops)


def _reach(starts: npt.NDArray[np.bool_], stops: Stops) -> npt.NDArray[np.bool_]:
    """Boundaries in some ``(start, stops[start]]``."""
    size = len(starts)
    firsts = np.flatnonzero(starts)
    opened = np.bincount(firsts + 1, minlength=size + 1)
    closed = np.bincount(stops[firsts] + 1, minlength=size + 1)
    return np.cumsum(opened - closed)[:size] > 0


def _trace_back(prefix: list[int], reached: list[npt.NDArray[np.bool_]], stops: list[Stops]) -> list[int]:
    """From the last boundary to the first, the one nearest to an even share of what lies before."""
    num_stages = len(stops)
    bounds = [0] * num_stages + [len(prefix) - 1]
    for stage in range(num_stages - 1, 0, -1):
        stop = bounds[stage + 1]
        candidates = np.flatnonzero(reached[stage][:stop] & (stops[stage][:stop] >= stop)).tolist()
        bounds[stage] = _nearest_share(prefix, stage, stop, candidates)
    return bounds


def _nearest_share(prefix: list[int], stage: int, stop: int, candidates: list[int]) -> int:
    share = prefix[stop] * stage
    return min(candidates, key=lambda bound: abs(prefix[bound] * (stage + 1) - share))


def _bottleneck(prefix: list[int], slowness: list[int], bounds: list[int]) -> int:
    return max(slow * (prefix[stop] - prefix[start]) for slow, start, stop in zip(slowness, bounds, bounds[1:]))


def _fits(memory: MemoryModel | None, bounds: list[int]) -> bool:
    return memory is None or all(memory.fits(stage, *bounds[stage : stage + 2]) for stage in range(len(bounds) - 1))


def _none_fits(prefix: list[int], memory: MemoryModel) -> PartitionError:
    """The error of the partition that fits if every limit is raised by the same, smallest number of bytes."""
    equal = [1] * len(memory.limits)
    activations, inputs = memory.layer_bytes(0, len(memory.static_bytes))
    held = sum(activations) + sum(inputs)
    low, high = 1, sum(memory.static_bytes) + memory.micro_batches * held
    while low < high:
        middle = (low + high) // 2
        if _probe(prefix, equal, _room(memory, middle), prefix[-1]) is None:
            low = middle + 1
        else:
            high = middle
    nearest = _probe(prefix, equal, _room(memory, high), prefix[-1])
    assert nearest is not None
    try:
        check_fits(nearest, memory)
    except PartitionError as error:
        return PartitionError(f"no partition fits in memory; the nearest one: {error}")
    raise AssertionError("a partition fits after all")
