"""Routes of state from one layout to another: the rows of elements to copy or send. Pure; the same on every rank.

Resharding, freezing and re-packing are routes between two layouts.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from ds_dynmo.engine.move.layout import Interval, Layout, Shard
from ds_dynmo.engine.state.keys import ParamKey

__all__ = ["Route", "Row"]


class Row(NamedTuple):
    """``numel`` consecutive elements of an old shard and of a new one, from these offsets on."""

    source: Shard
    destination: Shard
    source_offset: int
    destination_offset: int
    numel: int


@dataclass(frozen=True)
class Route:
    """All copies and messages between two layouts. It checks itself on construction.

    Attributes:
        rows: sorted by destination.

    Raises:
        AssertionError: a row has other elements than belong there, or an element arrives twice or not at all.
    """

    old: Layout
    new: Layout
    rows: tuple[Row, ...]

    @classmethod
    def between(cls, old: Layout, new: Layout) -> Route:
        """Plan the route from ``old`` to ``new``.

        A parameter comes from its new stage if that stage has it already, else from the first stage that has it.
        Parameters that ``old`` lacks have no rows.
        """
        return cls(old, new, tuple(_joined(row for row, _ in _rows(old, new))))

    def __post_init__(self) -> None:
        known = {interval.key for held in self.old.intervals.values() for interval in held}
        coming = dict.fromkeys(self.new.intervals, 0)
        for row in self.rows:
            _check(row, self.old.intervals[row.source], self.new.intervals[row.destination])
            coming[row.destination] += row.numel
        for row, following in pairwise(self.rows):
            overlaps = row.destination_offset + row.numel > following.destination_offset
            assert not (overlaps and row.destination == following.destination), f"{following} overlaps {row}"
        for shard, held in self.new.intervals.items():
            due = sum(interval.numel for interval in held if interval.key in known)
            assert coming[shard] == due, f"{coming[shard]} elements arrive in {shard}, {due} are due"

    def rows_by_interval(self) -> Iterator[tuple[Row, Interval]]:
        """Yield the rows, each cut to one interval of both layouts, with the interval of the new one."""
        yield from _rows(self.old, self.new)

    def inverse(self) -> Route:
        """Return the route back, of the parameters that both layouts have."""
        return Route.between(self.new, self.old)

    @cached_property
    def digest(self) -> str:
        """A hash of the rows, by which ranks compare their routes before a byte travels."""
        return hashlib.sha256(repr(self.rows).encode()).hexdigest()


def _rows(old: Layout, new: Layout) -> Iterator[tuple[Row, Interval]]:
    """Yield the rows, each of one interval of both layouts, sorted by destination, with the interval of the new one."""
    holders: dict[ParamKey, dict[int, list[tuple[Shard, Interval]]]] = {}
    for shard in sorted(old.intervals):
        for interval in old.intervals[shard]:
            holders.setdefault(interval.key, {}).setdefault(shard.stage, []).append((shard, interval))
    for destination in sorted(new.intervals):
        for target in new.intervals[destination]:
            stages = holders.get(target.key, {})
            held = stages.get(destination.stage) or next(iter(stages.values()), [])
            for source, interval in sorted(held, key=lambda held: held[1].start):
                start = max(interval.start, target.start)
                numel = min(interval.start + interval.numel, target.start + target.numel) - start
                if numel > 0:
                    source_offset = interval.offset + start - interval.start
                    destination_offset = target.offset + start - target.start
                    yield Row(source, destination, source_offset, destination_offset, numel), target


def _joined(rows: Iterator[Row]) -> Iterator[Row]:
    """Join rows that are adjacent in both shards."""
    last: Row | None = None
    for row in rows:
        if last is not None and row[:4] == (
            last.source,
            last.destination,
            last.source_offset + last.numel,
            last.destination_offset + last.numel,
        ):
            last = last._replace(numel=last.numel + row.numel)
            continue
        if last is not None:
            yield last
        last = row
    if last is not None:
        yield last


def _check(row: Row, held: tuple[Interval, ...], wanted: tuple[Interval, ...]) -> None:
    """Check that a row, from a shard with ``held`` to one with ``wanted``, brings the elements that belong there."""
    source, destination = _at(held, row.source_offset), _at(wanted, row.destination_offset)
    done = 0
    while done < row.numel:
        assert source < len(held) and destination < len(wanted), f"{row} is longer than what is held and due"
        here, there = held[source], wanted[destination]
        begin, end = row.source_offset + done - here.offset, row.destination_offset + done - there.offset
        assert 0 <= begin < here.numel and 0 <= end < there.numel, f"{row} brings padding"
        assert here.key == there.key and here.start + begin == there.start + end, f"{row} brings {here}, due is {there}"
        length = min(here.numel - begin, there.numel - end, row.numel - done)
        source, destination = source + (begin + length == here.numel), destination + (end + length == there.numel)
        done += length


def _at(intervals: tuple[Interval, ...], offset: int) -> int:
    """Find the last interval that begins at ``offset`` or before."""
    return max(bisect_right(intervals, offset, key=attrgetter("offset")) - 1, 0)
