"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_dynmo import CheckpointError
from ds_dynmo.engine.save import checkpointer, destinations
from ds_dynmo.engine.save.folder import read_latest
from ds_dynmo.engine.save.safe_load import safe_load
from tests.faults.fault import Fault
from tests.support.checkpoints import load_each, plain, train_on
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.ports import free_port
from tests.support.training import Warnings, build, gather, state

pytestmark = pytest.mark.ranks

BACKGROUND: dict[str, Any] = {"interval": 0, "checkpoint": "background", "timeout_seconds": 20}
write_records = destinations.write_records


def write_after(wait: Callable[[], Any]) -> None:
    """Let saves of this rank write nothing before ``wait`` returns."""

    def write(records: Any, path: str) -> None:
        assert wait() is not False
        write_records(records, path)

    destinations.write_records = write


# -- what is written ----------------------------------------------------------------------------------


def save_both_ways(case: Case, into: str) -> None:
    """Stop training to save; then save in the background, once training has changed all of it and has moved layers."""
    engine, may_write = build(case), threading.Event()
    train_on(engine, 0, 2)
    client_state: dict[str, Any] = {"epoch": 4, "best": [1.5]}
    for kind in ("blocking", "background"):
        torch.manual_seed(engine.global_rank)
        engine.checkpointer._saves_in_background = lambda kind=kind: kind == "background"
        if kind == "background":
            write_after(lambda: may_write.wait(100))
        engine.save_checkpoint(f"{into}/{kind}", client_state=client_state)
    client_state["best"].append(0.5)
    train_on(engine, 2, 1)
    engine.rebalance([0, 1, 8])
    train_on(engine, 3, 1)
    assert not os.path.exists(f"{into}/background/global_step2")
    may_write.set()
    engine.wait_for_save()
    assert read_latest(f"{into}/background") == "global_step2"


def check_same_files(folder: Path) -> None:
    background, blocking = (
        {path.relative_to(folder / kind): path for path in (folder / kind).rglob("*") if path.is_file()}
        for kind in ("background", "blocking")
    )
    assert background.keys() == blocking.keys() and len(background) > 10
    for name, path in background.items():
        if name.suffix == ".pt":
            assert plain(safe_load(str(path))) == plain(safe_load(str(blocking[name]))), name
        else:
            assert path.read_bytes() == blocking[name].read_bytes(), name


def test_a_save_in_the_background_writes_the_same_files_whatever_changes_later(tmp_path: Path) -> None:
    cases = {
        "fp32": Case(tied=True, scheduler=True, dynmo=BACKGROUND),
        "bf16": Case(precision="bf16", dynmo=BACKGROUND),
        "bf16 zero1": Case(precision="bf16 zero1", groups="two", dynmo=BACKGROUND),
    }
    run_each(2, save_both_ways, *((case, f"{tmp_path}/{name}") for name, case in cases.items()))
    for name in cases:
        check_same_files(tmp_path / name)


@pytest.mark.nightly
def test_so_do_replicas(tmp_path: Path) -> None:
    case = Case(precision="bf16 zero1", replicas=2, groups="two", dynmo=BACKGROUND)
    run(4, save_both_ways, case, str(tmp_path))
    check_same_files(tmp_path)


# -- who waits ----------------------------------------------------------------------------------------


def save_and_call(case: Case, into: str) -> None:
    """Call the engine while a save waits for somebody to wait for it."""
    engine = build(case)
    train_on(engine, 0, 1)

    def call(first: str, function: Callable[[], Any]) -> None:
        may_write = threading.Event()
        write_after(lambda: may_write.wait(100))
        engine.save_checkpoint(into, tag=first)
        before = state(engine), engine.partition
        thread = engine.checkpointer._under_way._thread
        join = thread.join

        def joined(*args: Any) -> None:
            assert not os.path.exists(f"{into}/{first}")
            may_write.set()
            join(*args)

        thread.join = joined
        function()
        assert may_write.is_set() and os.path.isdir(f"{into}/{first}"), first
        if not engine.repacks and not engine.released:
            engine.wait_for_save()
            assert (state(engine), engine.partition) == before, first

    call("first", lambda: engine.save_checkpoint(into, tag="second"))
    call("third", lambda: engine.load_checkpoint(into, tag="third"))
    assert not engine.repacks
    call("fourth", lambda: engine.repack(1))
    assert engine.released or engine.num_stages == 1


def test_what_needs_the_checkpoint_waits_for_it(tmp_path: Path) -> None:
    run(2, save_and_call, Case(micro_batches=1, dynmo=BACKGROUND), str(tmp_path), complete=False)
    assert sorted(os.listdir(tmp_path)) == ["first", "fourth", "latest", "second", "third"]


def save_and_end(rank: int, port: int, into: str) -> None:
    """Save as the last thing that a process does: no file is written before its main thread is over."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ.update(meet, RANK=str(rank), LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    write_after(threading.main_thread().join)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    engine = build(Case(dynmo={"interval": 0, "checkpoint": "background"}))
    train_on(engine, 0, 1)
    engine.save_checkpoint(into)
    assert not os.path.exists(f"{into}/latest")


def test_a_script_that_ends_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The store by which ranks agree is in the process of rank 0."""
    context, port = multiprocessing.get_context("forkserver"), free_port()
    context.set_forkserver_preload(["tests.support.preload"])
    ranks = [context.Process(target=save_and_end, args=(rank, port, str(tmp_path)), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert run(2, load_each, Case(), [str(tmp_path)]) == [[True]] * 2


# -- failures -----------------------------------------------------------------------------------------


def call_after_failures(case: Case, into: str) -> list[tuple[str, str, int, list[str]]]:
    """Call the engine when rank 1's disk was full; return, per call, the error, the step and the warnings."""
    engine, warnings, found = build(case), Warnings(), []
    calls: dict[str, Callable[[], Any]] = {
        "train_batch": lambda: train_on(engine, engine.global_steps, 1),
        "save_checkpoint": lambda: engine.save_checkpoint(into, tag="next"),
        "load_checkpoint": lambda: engine.load_checkpoint(into),
        "rebalance": lambda: engine.rebalance([0, 1, 8]),
        "repack": lambda: engine.repack(1),
        "wait_for_save": engine.wait_for_save,
    }
    train_on(engine, 0, 1)
    engine.save_checkpoint(into, tag="good")
    engine.wait_for_save()
    for name, call in calls.items():
        step = engine.global_steps
        Fault(1, 0, "save: write a file", "disk full").inject(engine)
        engine.save_checkpoint(into, tag="bad")
        engine.checkpointer._under_way._thread.join()
        gather(None)  # now the failure is known on every rank
        if name == "train_batch":
            train_on(engine, step, 1)  # tells the others
        before = engine.global_steps, engine.partition
        with pytest.raises(CheckpointError) as caught:
            pytest.fail(f"{name}: {call()}")
        assert (engine.global_steps, engine.partition) == before, name
        assert sorted(os.listdir(into)) == ["good", "latest"] and read_latest(into) == "good", name
        found.append((name, str(caught.value), step, [line for line in warnings.messages if into in line]))
        warnings.messages.clear()
        train_on(engine, engine.global_steps, 1)
        engine.save_checkpoint(into, tag="good")
        engine.wait_for_save()
        saved = engine.global_steps, state(engine)
        engine.load_checkpoint(into)
        assert saved == (engine.global_steps, state(engine)), name
    return found


def test_a_failed_write_is_an_error_of_the_next_call_on_every_rank(tmp_path: Path) -> None:
    says = f"rank 1: OSError: [Errno 28] No space left on device: '{tmp_path}/.bad.writing/"
    for first, other in zip(
        *run(2, call_after_failures, Case(micro_batches=1, dynmo=BACKGROUND), str(tmp_path)), strict=True
    ):
        (call, error, step, (warning,)), (_, other_error, _, none) = first, other
        assert error.startswith(f"{tmp_path}/bad: {says}") and other_error.startswith(f"{tmp_path}/bad: {says}"), call
        assert not none and warning.startswith(f"DynMo step {step}: checkpoint {tmp_path}/bad was not saved: {says}")


def save_with_few_bytes(case: Case, into: str) -> list[tuple[bool, list[str]]]:
    """Save with one byte too little for a copy, twice, and with just enough; say which saves were in the background."""
    engine, warnings, found = build(case), Warnings(), []
    train_on(engine, 0, 1)
    memory = engine.rebalancer.decider.memory
    memory.limit = 10**12
    held = memory.held()
    present, copied = checkpointer._most_bytes(held, engine.stage.placement)
    for tag, limit in enumerate((present + copied - 1, present + copied - 1, present + copied)):
        memory.limit = limit
        engine.save_checkpoint(into, tag=str(tag))
        found.append((engine.checkpointer._under_way is not None, list(warnings.messages)))
        engine.wait_for_save()
    says = (
        f"the {copied} bytes that a save in the background copies would take a rank to {present + copied} bytes, above "
    )
    assert all(says + str(present + copied - 1) in message for message in warnings.messages)
    return found


def test_on_a_cpu_the_copy_counts_with_the_memory_limit_and_a_save_is_reported_when_it_is_whole(tmp_path: Path) -> None:
    report, into = tmp_path / "report.jsonl", tmp_path / "saved"
    case = Case(dynmo={**BACKGROUND, "report": str(report)})
    first, other = run(2, save_with_few_bytes, case, str(into), backend="gloo")
    in_background = [False, False, True]
    for found in (first, other):
        assert [background for background, _ in found] == in_background
    assert [len(messages) for _, messages in first] == [1, 1, 1] and not other[-1][1]
    records = [record for record in map(json.loads, report.read_text().splitlines()) if record["kind"] == "save"]
    for tag, (record, background) in enumerate(zip(records, in_background, strict=True)):
        path = into / str(tag)
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file() and file.suffix != ".json"]
        assert record["path"] == str(path) and record["bytes_saved"] == sum(sizes) and record["step"] == 1
        assert record["background"] == background and 0 < record["wait_seconds"] <= record["save_seconds"]
