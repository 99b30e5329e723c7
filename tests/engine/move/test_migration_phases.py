"""The phases of a migration: what may change between them, when tensors are alive, and what a failure leaves."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_dynmo import MigrationError
from ds_dynmo.engine.move.migrator import Migrator
from ds_dynmo.plan import MigrationPlan
from tests.emulated import not_on_it
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import Block, Embedding, Head
from tests.support.training import (
    batches,
    build,
    layers_of,
    move_in_phases,
    outcome_of,
    raw,
    state,
    train_in_phases,
    whole,
)

pytestmark = pytest.mark.ranks

MOVES = ([0, 1, 4, 8], [0, 4, 7, 8])


class Changing(Block):
    """A block with one of everything that may change while it moves."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("seen", torch.zeros(3))
        self.calls = 0


def changing_layers(case: Case) -> list[Any]:
    blocks = [LayerSpec(Changing, index) for index in range(case.blocks)]
    return [LayerSpec(Embedding, 1), *blocks, nn.Identity(), LayerSpec(Head, 2)]


def migrator_of(engine: Any) -> Migrator:
    migrator: Migrator = engine.migrator
    return migrator


def plan_to(engine: Any, partition: Sequence[int]) -> MigrationPlan:
    return MigrationPlan.between(engine.partition, partition)


# -- all phases -------------------------------------------------------------------------------------------


def test_a_move_in_phases_changes_nothing() -> None:
    case = Case(stages=3, precision="bf16 zero1", groups="two", tied=True)
    still, *both = run_each(
        3, train_in_phases, (case, [None] * len(MOVES), True), (case, MOVES, True), (case, MOVES, False)
    )
    for moved in both:
        assert [result["losses"] for result in moved] == [result["losses"] for result in still]
        assert whole(moved) == whole(still)


def poll_a_late_stage() -> bool:
    """Start stage 1 once stage 0 has polled. Return whether the first poll found the move done."""
    engine = build(Case(start=(0, 4, 8)))
    engine.train_batch(batches(engine))
    engine.rebalance([0, 3, 8])  # connects the two
    migrator = migrator_of(engine)
    migrator.prepare(plan_to(engine, [0, 2, 8]), overlapped=True)
    if engine.stage_id == 1:
        dist.barrier()
    migrator.start()
    done = migrator.poll()
    if engine.stage_id == 0:
        dist.barrier()
    while not migrator.poll():
        time.sleep(1e-3)
    migrator.commit()
    return done


@not_on_it("without delays the host does the transfers, and waits for them")
def test_poll_does_not_wait_for_other_stages() -> None:
    assert not run(2, poll_a_late_stage)[0]


# -- what changes between prepare and commit -----------------------------------------------------------------


def change(engine: Any, layer: int) -> None:
    """Change what a batch or a dynamic layer may change beside weights."""
    module = layers_of(engine)[layer]
    module.seen += 7.0
    module.register_buffer("grown", torch.arange(5.0))
    module.calls = 3
    module.note = {"kept": [1, 2]}
    module.up.bias.requires_grad_(False)
    module.down.weight.mark = "changed"
    for group in engine.basic_optimizer.param_groups:
        group["lr"] = 0.125


def changed_while_prepared(precision: str) -> dict[str, Any]:
    """Move layer 2 from stage 0 to stage 1, change it on the way, and return what arrives."""
    engine = build(Case(precision=precision, start=(0, 4, 8), groups="two"), changing_layers)
    engine.train_batch(batches(engine))
    engine.train_batch(batches(engine))
    plain = engine.optimizer is engine.basic_optimizer
    migrator = migrator_of(engine)
    assert migrator.prepare(plan_to(engine, [0, 2, 8]), overlapped=True)
    migrator.start()
    get_accelerator().synchronize()  # overwritten values are sent again, but reported as races
    if engine.stage_id == 0:
        change(engine, 2)
        module = layers_of(engine)[2]
        if plain:
            engine.basic_optimizer.state[module.up.weight]["step"] += 40
            module.norm.bias.grad = torch.full_like(module.norm.bias, 9.0)
            with torch.no_grad():
                module.norm.weight.fill_(5.0)  # a constant tensor that changed is sent again
        weight = raw(module.up.weight)
    migrator.commit()
    engine.stage.publish_move()
    if engine.stage_id == 0:
        return {"weight": weight}
    module = layers_of(engine)[2]
    found = {
        "weight": raw(module.up.weight),
        "seen": module.seen.tolist(),
        "grown": module.grown.tolist(),
        "attributes": (module.calls, module.note, module.down.weight.mark),
        "trains": (module.up.bias.requires_grad, module.up.weight.requires_grad),
    }
    if plain:
        found["steps"] = engine.stage.state.state_of(module.up.weight)["step"].item()
        found["gradient"] = module.norm.bias.grad.tolist()[:1]
        found["norm"] = module.norm.weight.tolist()[:1]
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_changes_between_prepare_and_commit_arrive(precision: str) -> None:
    sender, receiver = run(2, changed_while_prepared, precision)
    assert receiver["weight"] == sender["weight"]
    assert receiver["seen"] == [7.0] * 3 and receiver["grown"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert receiver["attributes"] == (3, {"kept": [1, 2]}, "changed")
    assert receiver["trains"] == (False, True)
    if precision == "fp32":
        assert receiver["steps"] == 42.0 and receiver["gradient"] == [9.0] and receiver["norm"] == [5.0]


def counted_meanwhile() -> list[float]:
    """Return the step counts. A stage that was frozen has none, and takes that of the others at the commit."""
    engine = build(Case(precision="bf16", start=(0, 4, 8)))
    engine.train_batch(batches(engine))
    migrator = migrator_of(engine)
    assert migrator.prepare(plan_to(engine, [0, 2, 8]), overlapped=True)
    migrator.start()
    for held in engine.basic_optimizer.state.values():
        held["step"] += 10
    if engine.stage_id == 1:
        engine.basic_optimizer.state.clear()
    migrator.commit()
    engine.stage.publish_move()
    return [float(held["step"]) for held in engine.basic_optimizer.state.values()]


def test_step_counts_are_those_at_the_commit() -> None:
    assert run(2, counted_meanwhile) == [[11.0], [11.0]]


# -- when tensors are alive --------------------------------------------------------------------------------------


def alive(precision: str, overlapped: bool) -> list[tuple[int, int]]:
    """Return, after each phase, how many weights of leaving layers have memory, and how many layers the stage has."""
    engine = build(Case(stages=3, blocks=6, precision=precision, start=(0, 3, 6, 9)))
    engine.train_batch(batches(engine))
    layers = layers_of(engine)
    watched = [
        weakref.ref(parameter) for index in (3, 4, 5) if index in layers for parameter in layers[index].parameters()
    ]
    del layers
    found = []

    def look() -> None:
        left = sum(ref() is not None and ref().numel() > 0 for ref in watched)  # type: ignore[union-attr]
        found.append((left, len(layers_of(engine))))

    gc.disable()
    migrator = migrator_of(engine)
    look()
    migrator.prepare(plan_to(engine, [0, 1, 3, 9]), overlapped=overlapped)
    look()
    migrator.start()
    while overlapped and not migrator.poll():
        time.sleep(1e-3)
    look()
    migrator.commit()
    look()
    gc.enable()
    return found


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16"])
def test_sent_tensors_live_until_the_commit(precision: str) -> None:
    for ranks in run_each(3, alive, (precision, True), (precision, False)):
        prepared, started, arrived, committed = ranks[1]
        assert prepared == started == arrived == (18, 3)
        assert committed == (0, 2)


# -- harmless ends -------------------------------------------------------------------------------------------


@contextmanager
def broken_on(engine: Any, rank: int, how: str) -> Iterator[None]:
    """Make packing a layer or allocating memory fail on one rank."""
    name = {"pack": "record", "allocate": "recv_buffer_of"}[how]

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    if engine.global_rank == rank:
        setattr(engine.stage.state, name, fail)
    try:
        yield
    finally:
        vars(engine.stage.state).pop(name, None)


def end_harmlessly(case: Case, how: str) -> dict[str, Any]:
    """Prepare a move that fails or is abandoned, and train on."""
    engine = build(case)
    data, losses, message = batches(engine), [], ""
    losses.append(engine.train_batch(data).item())
    before, memory = state(engine), allocated()
    for overlapped in (True, False):
        migrator = migrator_of(engine)
        if how == "abandon":
            migrator.prepare(plan_to(engine, [0, 1, 8]), overlapped=overlapped)
            migrator.abandon()
        elif how != "still":
            with broken_on(engine, 1, how), pytest.raises(MigrationError) as failure:
                migrator.prepare(plan_to(engine, [0, 1, 8] if how == "allocate" else [0, 7, 8]), overlapped=overlapped)
            assert failure.value.harmless
            message = str(failure.value)
            del failure
        del migrator
    left_bytes = allocated() - memory
    same = state(engine) == before
    losses.append(engine.train_batch(data).item())
    if how != "still":
        move_in_phases(engine, [0, 6, 8], overlapped=True)
    losses.append(engine.train_batch(data).item())
    return {**outcome_of(engine, losses), "message": message, "same": same, "left_bytes": left_bytes}


def allocated() -> int:
    """Return the bytes of floating-point tensors. gloo's threads free other tensors at any time."""
    gc.collect()
    storages = {}
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == "cpu":
            storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16 zero1"])
def test_a_move_that_is_not_started_leaves_no_trace(precision: str) -> None:
    case, ways = Case(precision=precision, groups="two", start=(0, 4, 8)), ("abandon", "pack", "allocate")
    still, *ended = run_each(2, end_harmlessly, (case, "still"), *((case, how) for how in ways))
    for how, results in zip(ways, ended, strict=True):
        for result in results:
            assert result["same"], how
            assert result["left_bytes"] <= 0, how  # gloo may meanwhile free tensors that the batch before sent
            if how != "abandon":
                assert "failed on ranks [1], first with MemoryError: no room. No layer" in result["message"], how
        assert [result["losses"] for result in results] == [result["losses"] for result in still], how
        assert whole(results) == whole(still), how
        assert (results[0]["partition"], still[0]["partition"]) == ([0, 6, 8], [0, 4, 8]), how  # a later move is made


FLAT = ("bf16", "bf16 zero1", "fp32 zero1")


def move_before_the_step(precision: str) -> tuple[str, list[float]]:
    """Ask for a move between a batch's backward passes and its step. Return the error and the losses."""
    engine = build(Case(precision=precision))
    data = batches(engine)
    messages: list[str] = []

    def ask() -> None:
        with pytest.raises(MigrationError) as failure:
            migrator_of(engine).prepare(plan_to(engine, [0, 2, 8]))
        assert failure.value.harmless
        messages.append(str(failure.value))

    engine.before_step(ask)
    losses = [engine.train_batch(data).item() for _ in range(2)]
    return "".join(messages[:1]), losses


def test_a_move_that_would_lose_gradients_is_refused() -> None:
    for precision, ranks in zip(FLAT, run_each(2, move_before_the_step, *((precision,) for precision in FLAT))):
        for message, losses in ranks:
            assert "getting layers ready to move failed on ranks [0, 1]" in message, precision
            assert "after the optimizer's step" in message and len(losses) == 2, precision
