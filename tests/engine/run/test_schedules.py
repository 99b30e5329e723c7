"""Training under our own schedules equals a chain under DeepSpeed's 1F1B, to the bit, wherever layers are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from deepspeed.pipe import DualPipeVModule

from ds_dynmo.schedules import one_f_one_b, schedule_for_equal_costs
from tests.support.configs import PRECISIONS, SHAPES, Case
from tests.support.harness import run, run_each
from tests.support.training import batches, build, gather, outcome_of, train_frozen, whole

pytestmark = pytest.mark.ranks

KINDS = ("zero_bubble", "v", "loop")
ZERO_BUBBLE = {"interval": 0, "schedule": {"kind": "zero_bubble"}}


def under(kind: str, case: Case) -> Case:
    return replace(case, dynmo={"interval": 0, "schedule": {"kind": kind}, **(case.dynmo or {})})


class Arm(NamedTuple):
    """A run to compare with one of layers that stay under 1F1B.

    Attributes:
        moves: one after each batch.
        background: whether layers move while the next batch trains.
        dual_pipe: whether the model is a ``DualPipeVModule``.
    """

    case: Case
    moves: Sequence[Sequence[int]] = ()
    background: bool = False
    dual_pipe: bool = False


def train(arm: Arm, steps: int) -> dict[str, Any]:
    """Train, with an iterator for each batch, and evaluate once. Return also which batches ran in 1F1B's order.

    Under a schedule of ours the order for equal costs runs from the first batch on, also under checkpointing.
    """
    with ExitStack() as stack:
        if "schedule" in (arm.case.dynmo or {}):
            equal_costs = mock.patch("ds_dynmo.engine.run.schedule_in_force.one_f_one_b", schedule_for_equal_costs)
            stack.enter_context(equal_costs)
        if arm.dual_pipe:
            stack.enter_context(mock.patch("tests.support.models.PipelineModule", DualPipeVModule))
        engine = build(arm.case)
        data, losses, waiting, evaluation, in_1f1b = batches(engine), [], list(arm.moves), 0.0, []
        for step in range(steps):
            losses.append(engine.train_batch(iter([next(data) for _ in range(arm.case.micro_batches)])).item())
            in_1f1b.append(engine.stage.schedule.running == one_f_one_b(arm.case.stages, arm.case.micro_batches))
            if waiting:
                engine.rebalance(waiting.pop(0), background=arm.background)
            if step == steps // 2:
                evaluation = engine.eval_batch(batches(engine, seed=7)).item()
        return {**outcome_of(engine, losses), "evaluation": evaluation, "in 1F1B": in_1f1b}


def check_same(case: Case, arms: dict[str, Arm], steps: int = 5) -> None:
    """Compare with a chain under 1F1B that stays where it is."""
    still, *others = run_each(case.ranks, train, (Arm(case), steps), *((arm, steps) for arm in arms.values()))
    assert still[0]["in 1F1B"] == [True] * steps and still[0]["moved"] == 0
    for (name, arm), found in zip(arms.items(), others, strict=True):
        assert [r["losses"] for r in found] == [r["losses"] for r in still], name
        assert [r["evaluation"] for r in found] == [r["evaluation"] for r in still], name
        assert whole(found) == whole(still), name
        assert found[0]["in 1F1B"] == [False] * steps, name
        assert not arm.moves or found[0]["partition"] == arm.moves[-1], name


def nightly(*values: str) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


V_TO_CHAIN = [[0, 2, 3, 4, 8], [0, 5, 8], [0, 1, 5, 6, 8], [0, 1, 3, 6, 8]]  # in the end a V turns earlier
CHAINS = [[0, 2, 8], [0, 7, 8], [0, 1, 8], [0, 5, 8]]


@pytest.mark.parametrize("precision", ["bf16 zero1", *nightly("fp32", "bf16", "fp32 zero1")])
def test_moves_before_every_batch_under_every_schedule_change_nothing(precision: str) -> None:
    """A V and a loop become a chain and come back."""
    case = Case(precision=precision, tied=True, groups="two", dropout=True, micro_batches=4)
    recomputed = replace(case, checkpoint_interval=1)
    other_way = replace(case, checkpoint_interval=2, reentrant=False)
    arms = {
        "zero bubble": Arm(under("zero_bubble", case), CHAINS),
        "a V with reentrant checkpointing": Arm(under("v", recomputed), V_TO_CHAIN),
        "a V in the background": Arm(under("v", case), V_TO_CHAIN, background=True),
        "a loop with the other checkpointing": Arm(under("loop", other_way), V_TO_CHAIN),
        "DeepSpeed's own V": Arm(under("v", case), [[0, 1, 4, 6, 8], [0, 3, 8]], dual_pipe=True),
    }
    check_same(case, arms)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_training_under_every_schedule_equals_1f1b(precision: str, shape: str) -> None:
    case = Case(precision=precision, micro_batches=5, **SHAPES[shape])
    check_same(case, {kind: Arm(under(kind, case)) for kind in KINDS})


def test_one_micro_batch() -> None:
    case = Case(stages=3, micro_batches=1)
    check_same(case, {kind: Arm(under(kind, case)) for kind in KINDS}, steps=2)


def test_deepspeeds_own_v_of_one_stage_trains_as_under_1f1b() -> None:
    case = Case(stages=1, micro_batches=2)
    check_same(case, {"a V": Arm(under("v", case), dual_pipe=True)}, steps=2)


def test_a_prefix_that_freezes_and_thaws_trains_as_under_1f1b() -> None:
    case, frozen = Case(micro_batches=4), {1: 3, 3: 5, 5: 0}
    moves = {2: [0, 5, 8], 4: [0, 7, 8]}
    still, *others = run_each(
        2, train_frozen, (case, frozen, {}), (under("zero_bubble", case), frozen, moves), (under("v", case), frozen, {})
    )
    for found in others:
        assert [r["losses"] for r in found] == [r["losses"] for r in still]
        assert whole(found) == whole(still)


def decided(case: Case) -> list[Any]:
    """Train, decide from a profile, and train on. Return the schedules in force."""
    engine = build(case)
    data, seen, losses = batches(engine), [], []
    for step in range(3):
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
    results = run(2, decided, Case(micro_batches=6))[0]
    assert results[0][0] == [(one_f_one_b(2, 6).hash, 0)] * 3
    assert all(part == (0.0, 0.0, 0) for part in results[0][2])


def first_order(case: Case) -> Any:
    engine = build(case)
    engine.train_batch(batches(engine))
    return gather(engine.stage.schedule.running)


def test_the_first_order_is_that_of_1f1b_where_memory_matters() -> None:
    """What passes hold is not known yet. Under checkpointing an order for equal costs needs several times as much."""
    case = Case(micro_batches=6, dynmo=ZERO_BUBBLE)
    limited = replace(case, dynmo={**ZERO_BUBBLE, "memory_limit": 10**9})
    checkpointed = replace(case, checkpoint_interval=1)
    results = run_each(2, first_order, (case,), (limited,), (checkpointed,))
    orders = [ranks[0] for ranks in results]
    assert orders == [[schedule_for_equal_costs(2, 6)] * 2, [one_f_one_b(2, 6)] * 2, [one_f_one_b(2, 6)] * 2]


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
