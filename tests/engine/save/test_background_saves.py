"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynmo import CheckpointError
from ds_dynmo.engine.save import checkpointer, destinations, folder
from ds_dynmo.engine.save.safe_load import safe_load
from tests.faults.fault import Fault
from tests.support.checkpoints import STEPS, check_same, load_and_continue, save_and_continue, train_on
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.ports import free_port
from tests.support.training import Warnings, build, gather, state

pytestmark = pytest.mark.ranks

BACKGROUND: dict[str, Any] = {"interval": 0, "checkpoint": "background", "timeout_seconds": 20}
ROOT = Path(__file__).parents[3]
write_records = destinations.write_records


def write_after(event: threading.Event) -> None:
    """Let saves of this rank write nothing before ``event``."""

    def write(records: Any, path: str) -> None:
        assert event.wait(100)
        write_records(records, path)

    destinations.write_records = write


# -- what is written ----------------------------------------------------------------------------------


def save_both_ways(case: Case, folder: str) -> None:
    """Save the same state in the background and by stopping training."""
    engine = build(case)
    train_on(engine, 0)
    for kind in ("background", "blocking"):
        torch.manual_seed(engine.global_rank)
        engine.checkpointer._saves_in_background = lambda kind=kind: kind == "background"
        engine.save_checkpoint(f"{folder}/{kind}", client_state={"epoch": 4})
        engine.wait_for_save()
        gather(None)


def same(one: Any, other: Any) -> bool:
    """Compare two contents of files, tensor by tensor."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or vars(one) == vars(other))


@pytest.mark.parametrize(
    "case",
    [
        Case(stages=2),
        Case(stages=2, precision="bf16"),
        Case(stages=2, precision="bf16 zero1", replicas=2, groups="two"),
        Case(stages=2, tied=True, scheduler=True),
    ],
    ids=["fp32", "bf16", "bf16-zero1-replicas", "tied"],
)
def test_a_save_in_the_background_writes_the_same_files(tmp_path: Path, case: Case) -> None:
    case = replace(case, dynmo=BACKGROUND)
    run(case.ranks, save_both_ways, case, str(tmp_path))
    background, blocking = (
        {path.relative_to(tmp_path / kind): path for path in (tmp_path / kind).rglob("*") if path.is_file()}
        for kind in ("background", "blocking")
    )
    assert background.keys() == blocking.keys() and len(background) > 10
    for name, path in background.items():
        if name.suffix == ".pt":
            assert same(safe_load(str(path)), safe_load(str(blocking[name]))), name
        else:
            assert path.read_bytes() == blocking[name].read_bytes(), name


def save_while_training(case: Case, into: str) -> dict[str, Any]:
    """Write a checkpoint only when later batches have changed all that is in it, and layers have moved."""
    engine = build(case)
    may_write = threading.Event()
    write_after(may_write)
    client_state: dict[str, Any] = {"epoch": 4, "best": [1.5]}
    train_on(engine, 0)
    engine.save_checkpoint(into, client_state=client_state)
    client_state["best"].append(0.5)
    losses = train_on(engine, STEPS)
    found = {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}
    found |= {"steps": (engine.global_steps, engine.global_samples, engine.module.micro_offset, engine.skipped_steps)}
    found |= {"lr": engine.get_lr()}
    engine.rebalance([0, 1, 8])
    train_on(engine, 2 * STEPS, 1)
    assert not os.path.exists(f"{into}/global_step{STEPS}")
    may_write.set()
    engine.wait_for_save()
    assert folder.read_latest(into) == f"global_step{STEPS}"
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
@pytest.mark.every_variant
def test_nothing_that_changes_later_is_written(tmp_path: Path, precision: str) -> None:
    case = Case(stages=2, precision=precision, scheduler=True, dynmo=BACKGROUND)
    saved = run(2, save_while_training, case, str(tmp_path))
    loaded = run(2, load_and_continue, case, str(tmp_path))
    check_same(saved, loaded)
    assert loaded[0]["client"] == {"epoch": 4, "best": [1.5]}


# -- who waits ----------------------------------------------------------------------------------------


def save_and_call(case: Case, into: str, call: str) -> None:
    """Call the engine while a save waits for somebody to wait for it."""
    engine = build(case)
    may_write = threading.Event()
    write_after(may_write)
    train_on(engine, 0)
    engine.save_checkpoint(into, tag="first")
    before = state(engine)
    thread = engine.checkpointer._under_way._thread
    join = thread.join

    def joined(*args: Any) -> None:
        may_write.set()
        join(*args)

    thread.join = joined
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: engine.save_checkpoint(into, tag="second"),
        "load": lambda: engine.load_checkpoint(into, tag="first"),
        "repack": lambda: engine.repack(1),
    }
    calls[call]()
    assert may_write.is_set() and os.path.isdir(f"{into}/first")
    if engine.released:
        return
    engine.wait_for_save()
    assert not engine.repacks if call != "repack" else engine.num_stages == 1
    if call != "repack":
        assert state(engine) == before


@pytest.mark.parametrize("call", ["save", "load", "repack"])
def test_what_needs_the_checkpoint_waits_for_it(tmp_path: Path, call: str) -> None:
    run(2, save_and_call, Case(stages=2, dynmo=BACKGROUND), str(tmp_path), call, complete=call != "repack")
    assert sorted(os.listdir(tmp_path)) == ["first", "latest", *(["second"] if call == "save" else [])]


EXITS = """
import sys, threading
import deepspeed
import ds_dynmo
from ds_dynmo.engine.save import destinations
from tests.support.checkpoints import train_on
from tests.support.configs import Case
from tests.support.training import build

write_records = destinations.write_records


def write_at_the_end(records, path):
    threading.main_thread().join()
    write_records(records, path)


destinations.write_records = write_at_the_end
ds_dynmo.skip_shm_operator()
deepspeed.init_distributed("gloo")
engine = build(Case(stages=2, dynmo={"interval": 0, "checkpoint": "background"}))
train_on(engine, 0)
engine.save_checkpoint(sys.argv[1])
"""


def test_a_script_that_ends_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """No file is written before the main thread is over; the store is in the process of rank 0."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", EXITS, str(tmp_path / "saved")],
            env={**os.environ, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"},
        )
        for rank in range(2)
    ]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    case = Case(stages=2)
    saved = run(2, save_and_continue, case, str(tmp_path / "reference"))
    loaded = run(2, load_and_continue, case, str(tmp_path / "saved"))
    check_same(saved, loaded)


# -- failures -----------------------------------------------------------------------------------------


def call_after_failure(case: Case, into: str, call: str) -> tuple[str, list[str]]:
    """Call the engine when rank 1's disk was full; return the error, and the warnings."""
    engine = build(case)
    warnings = Warnings()
    train_on(engine, 0)
    engine.save_checkpoint(into, tag="good")
    engine.wait_for_save()
    Fault(1, 0, "save: write a file", "disk full").inject(engine)
    engine.save_checkpoint(into, tag="bad")
    engine.checkpointer._under_way._thread.join()
    gather(None)  # now the failure is known on every rank
    if call == "train_batch":
        train_on(engine, STEPS, 1)  # tells the others
    calls: dict[str, Callable[[], Any]] = {
        "train_batch": lambda: train_on(engine, STEPS + 1, 1),
        "save_checkpoint": lambda: engine.save_checkpoint(into, tag="next"),
        "load_checkpoint": lambda: engine.load_checkpoint(into),
        "rebalance": lambda: engine.rebalance([0, 1, 8]),
        "repack": lambda: engine.repack(1),
        "wait_for_save": engine.wait_for_save,
    }
    steps, partition = engine.global_steps, engine.partition
    with pytest.raises(CheckpointError) as caught:
        calls[call]()
    assert (engine.global_steps, engine.partition) == (steps, partition)
    assert sorted(os.listdir(into)) == ["good", "latest"] and folder.read_latest(into) == "good"
    train_on(engine, STEPS + 2, 1)
    engine.save_checkpoint(into, tag="next")
    engine.wait_for_save()
    saved = engine.global_steps, state(engine)
    engine.load_checkpoint(into)
    assert saved == (engine.global_steps, state(engine))
    return str(caught.value), [message for message in warnings.messages if into in message]


CALLS = ["train_batch", "save_checkpoint", "load_checkpoint", "rebalance", "repack", "wait_for_save"]


def test_a_failed_write_is_an_error_of_the_next_call_on_every_rank(tmp_path: Path) -> None:
    case = Case(stages=2, dynmo=BACKGROUND)
    for call, results in zip(CALLS, run_each(2, call_after_failure, *((case, f"{tmp_path}/{c}", c) for c in CALLS))):
        into = f"{tmp_path}/{call}"
        says = f"rank 1: OSError: [Errno 28] No space left on device: '{into}/.bad.writing/"
        for error, _ in results:
            assert error.startswith(f"{into}/bad: {says}"), call
        (_, warnings), (_, others) = results
        assert len(warnings) == 1 and not others
        assert warnings[0].startswith(f"DynMo step {STEPS}: checkpoint {into}/bad was not saved: {says}")


def save_with_few_bytes(case: Case, into: str) -> list[tuple[bool, list[str]]]:
    """Save with one byte too little for a copy, twice, and with just enough; say which saves were in the background."""
    engine = build(case)
    warnings = Warnings()
    train_on(engine, 0)
    memory = engine.rebalancer.decider.memory
    memory.limit = 10**12
    held = memory.held()
    present, copied = checkpointer._most_bytes(held, engine.stage.placement)
    found = []
    for limit in (present + copied - 1, present + copied - 1, present + copied):
        memory.limit = limit
        engine.save_checkpoint(into)
        found.append((engine.checkpointer._under_way is not None, list(warnings.messages)))
        engine.wait_for_save()
    says = (
        f"the {copied} bytes that a save in the background copies would take a rank to {present + copied} bytes, above "
    )
    assert all(says + str(present + copied - 1) in message for message in warnings.messages)
    return found


def test_on_a_cpu_the_copy_counts_with_the_memory_limit(tmp_path: Path) -> None:
    first, other = run(2, save_with_few_bytes, Case(stages=2, dynmo=BACKGROUND), str(tmp_path), backend="gloo")
    assert [background for background, _ in first] == [False, False, True]
    assert [len(messages) for _, messages in first] == [1, 1, 1]
    assert [background for background, _ in other] == [False, False, True] and not other[-1][1]


# -- reports ----------------------------------------------------------------------------------------


def save_with_report(case: Case, into: str) -> None:
    engine = build(case)
    train_on(engine, 0)
    engine.save_checkpoint(into, tag="background")
    engine.checkpointer._saves_in_background = lambda: False
    engine.save_checkpoint(into, tag="blocking")


def test_a_save_is_reported_when_it_is_whole(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    case = Case(stages=2, dynmo={**BACKGROUND, "report": str(report)})
    run(2, save_with_report, case, str(tmp_path / "saved"))
    records = [record for record in map(json.loads, report.read_text().splitlines()) if record["kind"] == "save"]
    for record, tag in zip(records, ("background", "blocking"), strict=True):
        path = tmp_path / "saved" / tag
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file() and file.suffix != ".json"]
        assert record["path"] == str(path) and record["bytes_saved"] == sum(sizes) and record["step"] == STEPS
        assert record["background"] == (tag == "background")
        assert 0 < record["wait_seconds"] <= record["save_seconds"]
