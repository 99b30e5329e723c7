"""Training under our own schedules equals DeepSpeed's 1F1B, to the bit, wherever layers are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from ds_dynmo.schedules import one_f_one_b, schedule_for_equal_costs
from tests.support.configs import PRECISIONS, SHAPES, Case
from tests.support.harness import run, run_each
from tests.support.training import batches, build, gather, partitions, train, train_frozen, whole

pytestmark = pytest.mark.ranks

ZERO_BUBBLE = {"interval": 0, "schedule": {"kind": "zero_bubble"}}


def train_in_two_parts(case: Case, moves: list[list[int]], steps: int, every: int) -> dict[str, Any]:
    """Under checkpointing too, the order for equal costs runs from the first batch on."""
    with mock.patch("ds_dynmo.engine.run.schedule_in_force.one_f_one_b", schedule_for_equal_costs):
        return train(case, moves, steps, every)


def check_same(case: Case, moves: list[list[int]] | None = None, steps: int = 5, every: int = 1) -> None:
    """Compare with 1F1B, under which layers stay; under our own schedule they may move before every batch."""
    ours = replace(case, dynmo={**(case.dynmo or {}), **ZERO_BUBBLE})
    calls = (case, [], steps, every), (ours, moves or [], steps, every)
    still, moved = run_each(case.ranks, train_in_two_parts, *calls)
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert [r["evaluations"] for r in moved] == [r["evaluations"] for r in still]
    assert whole(moved) == whole(still)


@pytest.mark.parametrize(
    ("precision", "shape"),
    [
        pytest.param(precision, shape, marks=() if (number + turn) % 3 == 0 else pytest.mark.nightly)
        for number, precision in enumerate(PRECISIONS)
        for turn, shape in enumerate(SHAPES)
    ],
)
def test_training_equals_1f1b(precision: str, shape: str) -> None:
    check_same(Case(precision=precision, micro_batches=5, **SHAPES[shape]))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1", "fp32 zero1"])
def test_training_equals_1f1b_with_moves_before_every_batch(precision: str) -> None:
    case = Case(stages=3, precision=precision, micro_batches=4, groups="two")
    check_same(case, partitions(case, seed=5, count=4))


def test_training_equals_1f1b_with_tied_layers_on_one_stage() -> None:
    case = Case(stages=3, tied=True, micro_batches=4, dropout=True)
    check_same(case, partitions(case, seed=6, count=4))


def test_training_equals_1f1b_while_a_prefix_freezes_and_thaws() -> None:
    case, frozen = Case(stages=3, micro_batches=4), {1: 3, 3: 5, 5: 0}
    moves = {2: [0, 1, 5, 8], 4: [0, 5, 7, 8]}
    ours = replace(case, dynmo=ZERO_BUBBLE)
    still, moved = run_each(3, train_frozen, (case, frozen, {}), (ours, frozen, moves))
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert whole(moved) == whole(still)


def decided(case: Case) -> list[Any]:
    """Train, decide from a profile, and train on. Return the schedules in force."""
    engine = build(case)
    data, seen, losses = batches(engine), [], []
    for step in range(4):
        losses.append(float(engine.train_batch(data)))
        running = engine.stage.schedule.running
        seen.append((running.hash, running.splits))
        if step == 1:
            engine.rebalance()
    layers = engine.profile.layers
    parts = [(layer.input_gradient_seconds, layer.weight_gradient_seconds, layer.deferred_bytes) for layer in layers]
    return gather((seen, losses, parts, engine.profile.link_seconds, engine.profile.batch_seconds))


def test_a_decision_finds_an_order_that_all_ranks_run() -> None:
    case = Case(stages=3, replicas=2, micro_batches=6, tied=True, dynmo=ZERO_BUBBLE)
    results = run(6, decided, case)[0]
    assert all(seen == results[0][0] for seen, *_ in results)
    assert results[0][0][-1] != results[0][0][0]
    parts = results[0][2]
    products = [*parts[1:-2], parts[-1]]  # blocks of two linear layers each, and a head with the embedding's weight
    assert all(first > 0 and second > 0 and held > 0 for first, second, held in products)
    links = {link_seconds for *_, link_seconds, _ in results}  # measured once, and the slowest of all
    assert len(links) == 1 and 0 < links.pop() < results[0][-1]


def test_a_head_beside_its_embedding_on_one_stage_defers() -> None:
    """In a V both are on the first stage."""
    case = Case(stages=2, micro_batches=4, tied=True, dynmo={"interval": 0, "schedule": {"kind": "v"}})
    parts = run(2, decided, case)[0][0][2]
    assert all(value > 0 for value in parts[-1])


def test_1f1b_runs_unless_another_schedule_is_asked_for() -> None:
    results = run(3, decided, Case(stages=3, micro_batches=6))[0]
    assert results[0][0] == [(one_f_one_b(3, 6).hash, 0)] * 4
    assert all(part == (0.0, 0.0, 0) for part in results[0][2])


def first_order(case: Case) -> Any:
    engine = build(case)
    engine.train_batch(batches(engine))
    return gather(engine.stage.schedule.running)


def test_the_first_order_is_that_of_1f1b_where_memory_matters() -> None:
    """What passes hold is not known yet. Under checkpointing an order for equal costs needs several times as much."""
    case = Case(stages=3, micro_batches=6, dynmo=ZERO_BUBBLE)
    limited = replace(case, dynmo={**ZERO_BUBBLE, "memory_limit": 10**9})
    checkpointed = replace(case, checkpoint_interval=1)
    results = run_each(3, first_order, (case,), (limited,), (checkpointed,))
    orders = [ranks[0] for ranks in results]
    assert orders == [[schedule_for_equal_costs(3, 6)] * 3, [one_f_one_b(3, 6)] * 3, [one_f_one_b(3, 6)] * 3]


def decided_on_fewer_stages(case: Case) -> dict[str, Any]:
    """Decide an order on three stages, and on two after a rank has left."""
    engine = build(case)
    data, hashes, losses = batches(engine), {}, {}
    while engine.global_steps < 5:
        loss = engine.train_batch(data).item()
        losses[engine.global_steps] = loss
        running = engine.stage.schedule.running
        hashes[engine.global_steps] = running.hash
        if engine.global_steps in (1, 3):
            engine.rebalance()
        if engine.global_steps == 2:
            engine.repack(partition=[0, 3, 8])
        if engine.released:
            break
    return {"hashes": hashes, "losses": losses}


def test_ranks_that_stay_run_one_order() -> None:
    block = {"interval": 0, "schedule": {"kind": "zero_bubble"}, "profile": {"batches": 1, "warmup_batches": 0}}
    first, released, last = run(3, decided_on_fewer_stages, Case(stages=3, micro_batches=6, dynmo=block))
    assert first == last and len(first["hashes"]) == 5
    assert len(released["hashes"]) == 2
