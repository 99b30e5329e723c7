"""Where each element of a layout goes along a route, compared with copying element by element."""

from __future__ import annotations

import doctest
import random
from collections.abc import Mapping, Sequence

import pytest

from ds_dynmo.engine.move import layout
from ds_dynmo.engine.move.layout import Buffer, Interval, Layout, Shard, intervals_of_shards, shard_size
from ds_dynmo.engine.move.route import Route, Row
from ds_dynmo.engine.state.keys import ParamKey

Memory = dict[Shard, list[tuple[ParamKey, int] | None]]
LIVE, DETACHED = Buffer(0, detached=False), Buffer(0, detached=True)


def test_doctests() -> None:
    assert doctest.testmod(layout).failed == 0


def test_shard_size() -> None:
    assert [shard_size(total, 2) for total in (0, 1, 4, 5, 8, 9)] == [2, 2, 2, 4, 4, 6]
    assert shard_size(0, 3, detached=True) == 0 and shard_size(7, 1) == 8


def laid_out(stages: Mapping[int, Mapping[Buffer, Sequence[tuple[ParamKey, int]]]], replicas: int) -> Layout:
    intervals, sizes = {}, {}
    for stage, buffers in stages.items():
        for buffer, parameters in buffers.items():
            size = shard_size(sum(numel for _, numel in parameters), replicas, detached=buffer.detached)
            for replica, held in enumerate(intervals_of_shards(parameters, replicas, size)):
                shard = Shard(stage, replica, buffer)
                intervals[shard], sizes[shard] = held, size
    return Layout(intervals, sizes)


def filled(of: Layout) -> Memory:
    """Fill shards with the names of the elements that lie there."""
    memory: Memory = {shard: [None] * size for shard, size in of.sizes.items()}
    for shard, intervals in of.intervals.items():
        for key, start, numel, offset in intervals:
            memory[shard][offset : offset + numel] = [(key, start + element) for element in range(numel)]
    return memory


def carried(route: Route, memory: Memory) -> Memory:
    arrived: Memory = {shard: [None] * size for shard, size in route.new.sizes.items()}
    for row in route.rows:
        there = slice(row.destination_offset, row.destination_offset + row.numel)
        assert arrived[row.destination][there] == [None] * row.numel
        arrived[row.destination][there] = memory[row.source][row.source_offset :][: row.numel]
    return arrived


def random_layouts(chooser: random.Random) -> tuple[Layout, Layout]:
    """Make two layouts: layers move, freeze, thaw, go and come, and replicas become more or fewer."""
    before, after, stages, layers = chooser.choice([1, 2, 3]), chooser.choice([1, 2, 3]), chooser.choice([1, 2, 4]), 9
    buffers = [Buffer(group, detached) for group in (0, 1) for detached in (False, True)]
    numels = {
        ParamKey(layer, name): chooser.randint(0, 9)
        for layer in range(layers)
        for name in chooser.sample("abcdefg", chooser.randint(0, 4))
    }
    tied = {key for key in numels if key.layer == 0}  # layer 0 is used on the last stage, too

    def drawn(replicas: int) -> Layout:
        partition = [0, *sorted(chooser.sample(range(1, layers), stages - 1)), layers]
        held: dict[int, dict[Buffer, list[tuple[ParamKey, int]]]] = {}
        group = {key: chooser.choice(buffers) for key in numels if chooser.random() < 0.9}
        for stage in range(stages):
            held[stage] = {buffer: [] for buffer in buffers}
            for key, buffer in group.items():
                if partition[stage] <= key.layer < partition[stage + 1] or (key in tied and stage == stages - 1):
                    held[stage][buffer].append((key, numels[key]))
        return laid_out(held, replicas)

    return drawn(before), drawn(after)


def without(memory: Memory, unknown: set[ParamKey]) -> Memory:
    return {
        shard: [None if element is None or element[0] in unknown else element for element in elements]
        for shard, elements in memory.items()
    }


def keys_of(of: Layout) -> set[ParamKey]:
    return {interval.key for held in of.intervals.values() for interval in held}


@pytest.mark.parametrize("seed", range(60))
def test_every_element_arrives_once_and_finds_the_way_back(seed: int) -> None:
    old, new = random_layouts(random.Random(seed))
    there, back = Route.between(old, new), Route.between(old, new).inverse()
    arrived = carried(there, filled(old))
    assert arrived == without(filled(new), keys_of(new) - keys_of(old))
    assert carried(back, arrived) == without(filled(old), keys_of(old) - keys_of(new))
    assert there.digest == Route.between(old, new).digest


def test_what_lies_side_by_side_in_both_layouts_is_one_row() -> None:
    numels = [[(ParamKey(layer, "weight"), 8), (ParamKey(layer, "bias"), 2)] for layer in range(4)]
    old = laid_out({0: {LIVE: [*numels[0], *numels[1], *numels[2]]}, 1: {LIVE: numels[3]}}, 1)
    new = laid_out({0: {LIVE: numels[0]}, 1: {LIVE: [*numels[1], *numels[2], *numels[3]]}}, 1)
    first, second = Shard(0, 0, LIVE), Shard(1, 0, LIVE)
    assert Route.between(old, new).rows == (
        Row(first, first, 0, 0, 10),
        Row(first, second, 10, 0, 20),
        Row(second, second, 0, 20, 10),
    )


def test_a_parameter_comes_from_its_own_stage_if_that_has_it() -> None:
    weight = [(ParamKey(0, "weight"), 4)]
    old = laid_out({0: {LIVE: weight}, 1: {LIVE: weight, DETACHED: []}}, 1)
    new = laid_out({1: {LIVE: [], DETACHED: weight}}, 1)
    (row,) = Route.between(old, new).rows
    assert row == Row(Shard(1, 0, LIVE), Shard(1, 0, DETACHED), 0, 0, 4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param([], "0 elements arrive in .*, 8 are due", id="an element does not arrive"),
        pytest.param([(0, 0, 8), (4, 4, 4)], "overlaps", id="an element arrives twice"),
        pytest.param([(0, 2, 6), (6, 0, 2)], "due is", id="elements are swapped"),
        pytest.param([(0, 0, 9)], "longer than what is held and due", id="a row reaches into another parameter"),
        pytest.param([(1, 0, 7)], "due is", id="another element arrives"),
        pytest.param([(8, 0, 1), (1, 1, 7)], "due is", id="another parameter arrives"),
        pytest.param([(9, 0, 1), (1, 1, 7)], "padding", id="padding arrives"),
    ],
)
def test_a_route_that_does_not_lead_there_is_refused(rows: list[tuple[int, int, int]], message: str) -> None:
    shard = Shard(0, 0, LIVE)
    parameters = [(ParamKey(0, "weight"), 8), (ParamKey(0, "bias"), 1)]
    old, new = laid_out({0: {LIVE: parameters}}, 1), laid_out({0: {LIVE: parameters[:1]}}, 1)
    Route(old, new, (Row(shard, shard, 0, 0, 8),))
    with pytest.raises(AssertionError, match=message):
        Route(old, new, tuple(Row(shard, shard, *row) for row in rows))


def test_a_layout_whose_intervals_overlap_is_refused() -> None:
    shard, key = Shard(0, 0, LIVE), ParamKey(0, "weight")
    with pytest.raises(AssertionError, match="overlaps"):
        Layout({shard: (Interval(key, 0, 4, 0), Interval(key, 4, 4, 3))}, {shard: 8})
    with pytest.raises(AssertionError, match="ends at 6"):
        Layout({shard: (Interval(key, 0, 8, 0),)}, {shard: 6})
