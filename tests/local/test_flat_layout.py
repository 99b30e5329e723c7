"""Where each interval of a flat shard goes, compared with copying element by element."""

from __future__ import annotations

import random

import pytest

from ds_dynmo.engine.optimizer.flat_layout import Buffer, BufferKey, Member, plan_transfers, shard_size, stage_buffers

Stages = dict[int, dict[BufferKey, Buffer]]


def test_shard_size() -> None:
    assert [shard_size(total, 2) for total in (0, 1, 4, 5, 8, 9)] == [2, 2, 2, 4, 4, 6]
    assert shard_size(0, 3, parked=True) == 0 and shard_size(7, 1) == 8


def test_buffers_hold_their_members_in_order() -> None:
    members = {
        "tied e": [Member(0, 5, 0, False, False)],
        "3": [Member(0, 4, 0, False, True), Member(1, 2, 1, False, False), Member(2, 3, 0, False, False)],
    }
    before = stage_buffers(["tied e", "3"], members, 2, 2, after=False)
    assert before[0, False] == Buffer(
        {("tied e", 0): 0, ("3", 0): 5, ("3", 2): 9}, {("tied e", 0): 5, ("3", 0): 4, ("3", 2): 3}, 6
    )
    assert before[1, False].offsets == {("3", 1): 0} and before[0, True].shard == 0
    after = stage_buffers(["tied e", "3"], members, 2, 2, after=True)
    assert after[0, False].offsets == {("tied e", 0): 0, ("3", 2): 5}
    assert after[0, True].offsets == {("3", 0): 0} and after[0, True].shard == 2


@pytest.mark.parametrize("seed", range(30))
def test_every_element_arrives_once(seed: int) -> None:
    """Fill the old shards with names of elements, carry out the transfers, and read the new shards."""
    chooser = random.Random(seed)
    before, after, stages, layers = chooser.choice([1, 2, 3]), chooser.choice([1, 2, 3]), chooser.choice([1, 2, 4]), 9
    members = {
        str(layer): [
            Member(
                position=position,
                numel=chooser.randint(1, 9),
                group=chooser.randint(0, 1),
                parked=chooser.choice([False, False, False, True, None]),
                park=chooser.choice([False, False, False, True, None]),
            )
            for position in chooser.sample(range(9), chooser.randint(0, 4))
        ]
        for layer in range(layers)
    }
    is_new = {(unit, member.position) for unit, own in members.items() for member in own if member.parked is None}
    old_bounds, new_bounds = ([0, *sorted(chooser.sample(range(1, layers), stages - 1)), layers] for _ in range(2))

    def units(bounds: list[int], stage: int) -> list[str]:
        return [str(layer) for layer in range(bounds[stage], bounds[stage + 1])]

    old: Stages = {s: stage_buffers(units(old_bounds, s), members, 2, before, after=False) for s in range(stages)}
    new: Stages = {s: stage_buffers(units(new_bounds, s), members, 2, after, after=True) for s in range(stages)}
    source_of = {
        (stage, unit): next(s for s in range(stages) if unit in units(old_bounds, s))
        for stage in range(stages)
        for unit in units(new_bounds, stage)
    }
    memory = {(s, d, c): [None] * b.shard for s in old for c, b in old[s].items() for d in range(before)}
    for stage, buffers in old.items():
        for container, buffer in buffers.items():
            for key, offset in buffer.offsets.items():
                for element in range(buffer.numel[key]):
                    shard, place = divmod(offset + element, buffer.shard)
                    memory[stage, shard, container][place] = (key, element)  # type: ignore[call-overload]
    arrived = {(s, d, c): [None] * b.shard for s in new for c, b in new[s].items() for d in range(after)}
    for run in plan_transfers(old, new, source_of, (before, after)):
        row = memory[(*run.source, run.old)][run.start_old : run.start_old + run.numel]
        target = arrived[(*run.destination, run.new)]
        assert target[run.start_new : run.start_new + run.numel] == [None] * run.numel
        target[run.start_new : run.start_new + run.numel] = row
    for stage, buffers in new.items():
        for container, buffer in buffers.items():
            flat = [e for shard in range(after) for e in arrived[stage, shard, container]]
            assert [position for _, position in buffer.offsets] == sorted_within_layers(buffer)
            wanted = [None if key in is_new else (key, e) for key in buffer.offsets for e in range(buffer.numel[key])]
            assert flat[: len(wanted)] == wanted and not any(flat[len(wanted) :])


def sorted_within_layers(buffer: Buffer) -> list[int]:
    layers = dict.fromkeys(unit for unit, _ in buffer.offsets)
    return [place for layer in layers for place in sorted(p for unit, p in buffer.offsets if unit == layer)]


def test_adjacent_intervals_travel_together() -> None:
    members = {str(layer): [Member(0, 8, 0, False, False), Member(1, 2, 0, False, False)] for layer in range(4)}
    old = {
        0: stage_buffers(["0", "1", "2"], members, 1, 1, after=False),
        1: stage_buffers(["3"], members, 1, 1, after=False),
    }
    new = {
        0: stage_buffers(["0"], members, 1, 1, after=True),
        1: stage_buffers(["1", "2", "3"], members, 1, 1, after=True),
    }
    sources = {(0, "0"): 0, (1, "1"): 0, (1, "2"): 0, (1, "3"): 1}
    assert [(run.source, run.destination, run.numel) for run in plan_transfers(old, new, sources, (1, 1))] == [
        ((0, 0), (0, 0), 10),
        ((0, 0), (1, 0), 20),
        ((1, 0), (1, 0), 10),
    ]
