"""Layouts of flat buffers: which elements of which parameters lie in which shard. Pure values.

DeepSpeed's BF16_Optimizer and DeepSpeedZeroOptimizer keep, per parameter group, the stage's parameters in one flat
buffer, padded and cut into one equal shard per data-parallel rank. Frozen parameters lie in a *detached* buffer of
their group, cut the same way. The optimizer does not see it, and gets its contents back when they are unfrozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ds_dynmo.engine.state.keys import ParamKey

__all__ = ["Buffer", "Interval", "Layout", "Shard", "intervals_of_parameter", "intervals_of_shards", "shard_size"]


class Buffer(NamedTuple):
    """The flat buffer of a parameter group, on any stage: of its frozen parameters (detached), or of the others."""

    group: int
    detached: bool


class Shard(NamedTuple):
    """The part of a stage's buffer that one data-parallel rank holds, or a file of it."""

    stage: int
    replica: int
    buffer: Buffer


class Interval(NamedTuple):
    """Elements ``[start, start + numel)`` of a flattened parameter, which lie in a shard from ``offset`` on."""

    key: ParamKey
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """Which elements of which parameters each shard holds.

    Attributes:
        intervals: by shard, in ascending order of their offsets.
        sizes: by shard, its elements, padding included.

    Raises:
        AssertionError: intervals of a shard overlap, or exceed it.
    """

    intervals: Mapping[Shard, tuple[Interval, ...]]
    sizes: Mapping[Shard, int]

    def __post_init__(self) -> None:
        for shard, held in self.intervals.items():
            end = 0
            for interval in held:
                assert interval.numel > 0 and interval.offset >= end, f"{interval} of {shard} overlaps the one before"
                end = interval.offset + interval.numel
            assert end <= self.sizes[shard], f"{shard} ends at {self.sizes[shard]}, {held[-1]} does not"

    def used(self, shard: Shard) -> int:
        """Return the elements of a shard before its padding."""
        held = self.intervals[shard]
        return held[-1].offset + held[-1].numel if held else 0


def intervals_of_shards(
    parameters: Iterable[tuple[ParamKey | None, int]], shards: int, size: int
) -> Iterator[tuple[Interval, ...]]:
    """Cut a flat buffer into shards, and list the intervals of each.

    Args:
        parameters: in the buffer's order, each with the number of its elements; None: elements to skip.
        shards: number of shards.
        size: elements of each shard.

    >>> weight, bias = ParamKey(0, "weight"), ParamKey(0, "bias")
    >>> shards = intervals_of_shards([(weight, 6), (bias, 1)], 2, 4)
    >>> [[(i.key.name, i.start, i.numel, i.offset) for i in shard] for shard in shards]
    [[('weight', 0, 4, 0)], [('weight', 4, 2, 0), ('bias', 0, 1, 2)]]
    """
    intervals: list[list[Interval]] = [[] for _ in range(shards)]
    begin = 0
    for key, numel in parameters:
        for shard, interval in intervals_of_parameter(key, numel, begin, size) if key is not None else ():
            intervals[shard].append(interval)
        begin += numel
    return map(tuple, intervals)


def intervals_of_parameter(key: ParamKey, numel: int, begin: int, size: int) -> Iterator[tuple[int, Interval]]:
    """Yield the shards, and their intervals, of a parameter that lies in a flat buffer from element ``begin`` on.

    Args:
        size: elements of each shard.
    """
    done = 0
    while done < numel:
        shard, offset = divmod(begin + done, size)
        length = min(numel - done, size - offset)
        yield shard, Interval(key, done, length, offset)
        done += length


def shard_size(total: int, shards: int, *, detached: bool = False) -> int:
    """Count elements per shard: padded to 2 x ``shards`` as DeepSpeed 0.19.8 does. A live buffer is never empty.

    >>> shard_size(7, 2), shard_size(0, 2), shard_size(0, 2, detached=True)
    (4, 2, 0)
    """
    total = total if detached else max(total, 1)
    return -(-total // (2 * shards)) * 2
