"""The exact least bottleneck with memory limits or stages of different speeds.

Greedy filling is not exact here: a stage's limit depends on its position (early stages hold more micro-batches, slow
ones have less time), so some layers may only fit on late stages, and no stage may be empty. So each probe keeps, for
every stage, all boundaries that the stages before can reach.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners.memory import MemoryModel, check_fits
from ds_dynmo.partitioners.ties import Limits, even_out, evenest, fewest_moved, lightest_loads
from ds_dynmo.placement import Placement

__all__ = ["balanced_within"]

Stops = npt.NDArray[np.int64]


def balanced_within(
    prefix: list[int],
    memory: MemoryModel | None,
    start: list[int] | None,
    slowness: list[int],
    layer_bytes: Sequence[int],
) -> list[int]:
    """Find the partition of least bottleneck that fits; ties are broken as in :func:`balanced`.

    Args:
        prefix: exact prefix sums of the layers' costs.
        start: the current partition.
        slowness: per stage, the time of a unit of cost.
        layer_bytes: per layer, the bytes that move with it.

    Raises:
        PartitionError: no partition fits; names the stage, the bytes and the limit of the one that exceeds its limits
            least.
    """
    num_layers, num_stages = len(prefix) - 1, len(slowness)
    if memory is not None:
        memory.check_shape(num_layers, num_stages)
    room = [np.full(num_layers + 1, num_layers)] * num_stages if memory is None else _room(memory)
    best = _least_bottleneck(prefix, slowness, room)
    if best is None:
        assert memory is not None
        raise _none_fits(prefix, memory)
    furthest = None if memory is None else [stops.tolist() for stops in room]
    limits = Limits(prefix, slowness, _bottleneck(prefix, slowness, best), furthest)
    if len(set(slowness)) == 1:
        best = even_out(prefix, best, None if memory is None else memory.fits)
    reached = lightest_loads(limits, limits.lightest(best))
    floor = reached[-1][num_layers]
    if start is not None:
        return start if limits.met(start, floor) else fewest_moved(limits, floor, start, layer_bytes)
    if limits.lightest(best) == floor:
        return best
    best = evenest(limits, reached, floor)
    return best if len(set(slowness)) > 1 else even_out(prefix, best, None if memory is None else memory.fits)


def _least_bottleneck(prefix: list[int], slowness: list[int], room: list[Stops]) -> list[int] | None:
    """Find a partition of least bottleneck that fits, or None. Between probes both ends snap to loads of stages."""
    largest = max(b - a for a, b in zip(prefix, prefix[1:]))
    low = max(-(-prefix[-1] * min(slowness) // len(slowness)), largest * min(slowness))
    best, _ = _probe(prefix, slowness, room, prefix[-1] * max(slowness))
    if best is None:
        return None
    high = _bottleneck(prefix, slowness, best)
    while low < high:
        middle = (low + high) // 2
        partition, following = _probe(prefix, slowness, room, middle)
        if partition is None:
            low = following
        else:
            best, high = partition, _bottleneck(prefix, slowness, partition)
    return best


def _room(memory: MemoryModel, extra_bytes: int = 0) -> list[Stops]:
    """Compute, per stage and first layer, the furthest stop that fits."""
    return [np.array(memory.furthest_stops(stage, extra_bytes)) for stage in range(len(memory.limits))]


def _probe(prefix: list[int], slowness: list[int], room: list[Stops], bound: int) -> tuple[list[int] | None, int]:
    """Find a partition that fits with loads up to ``bound``, or None, and the next larger load of a stage."""
    under, following = {}, []
    for slow in set(slowness):
        ends = [bisect_right(prefix, before + bound // slow, lo=at) for at, before in enumerate(prefix)]
        under[slow] = np.array(ends) - 1
        following += [slow * (prefix[end] - before) for end, before in zip(ends, prefix) if end < len(prefix)]
    stops = [np.minimum(under[slow], furthest) for slow, furthest in zip(slowness, room)]
    reached = [np.arange(len(prefix)) == 0]
    for stage_stops in stops:
        reached.append(_reach(reached[-1], stage_stops))
    partition = _trace_back(prefix, reached, stops) if reached[-1][-1] else None
    return partition, min(following, default=bound + 1)


def _reach(starts: npt.NDArray[np.bool_], stops: Stops) -> npt.NDArray[np.bool_]:
    """Mark the boundaries in ``(start, stops[start]]`` of any start."""
    size = len(starts)
    firsts = np.flatnonzero(starts)
    opened = np.bincount(firsts + 1, minlength=size + 1)
    closed = np.bincount(stops[firsts] + 1, minlength=size + 1)
    return np.cumsum(opened - closed)[:size] > 0


def _trace_back(prefix: list[int], reached: list[npt.NDArray[np.bool_]], stops: list[Stops]) -> list[int]:
    """Choose boundaries nearest to an even share of the layers before, from the last to the first."""
    num_stages = len(stops)
    partition = [0] * num_stages + [len(prefix) - 1]
    for stage in range(num_stages - 1, 0, -1):
        stop = partition[stage + 1]
        candidates = np.flatnonzero(reached[stage][:stop] & (stops[stage][:stop] >= stop)).tolist()
        partition[stage] = _nearest_share(prefix, stage, stop, candidates)
    return partition


def _nearest_share(prefix: list[int], stage: int, stop: int, candidates: list[int]) -> int:
    share = prefix[stop] * stage
    return min(candidates, key=lambda start: abs(prefix[start] * (stage + 1) - share))


def _bottleneck(prefix: list[int], slowness: list[int], partition: list[int]) -> int:
    return max(slow * (prefix[stop] - prefix[start]) for slow, start, stop in zip(slowness, partition, partition[1:]))


def _none_fits(prefix: list[int], memory: MemoryModel) -> PartitionError:
    """Build the error from a partition that fits once all limits are raised by the smallest equal number of bytes."""
    equal = [1] * len(memory.limits)
    activations, inputs = memory.layer_bytes(0, len(memory.static_bytes))
    held = sum(activations) + sum(inputs)
    low, high = 1, sum(memory.static_bytes) + memory.micro_batches * held
    while low < high:
        middle = (low + high) // 2
        if _probe(prefix, equal, _room(memory, middle), prefix[-1])[0] is None:
            low = middle + 1
        else:
            high = middle
    nearest, _ = _probe(prefix, equal, _room(memory, high), prefix[-1])
    assert nearest is not None
    try:
        check_fits(Placement.chain(nearest), memory)
    except PartitionError as error:
        return PartitionError(f"no partition fits in memory; the nearest one: {error}")
    raise AssertionError("a partition fits after all")
