"""The measured timeline: the content of its file, and that recording changes nothing."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.measure import trace
from ds_dynmo.engine.measure.trace_events import CATEGORIES
from ds_dynmo.errors import ConfigError
from ds_dynmo.schedules import Kind, Schedule, first_batch
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import module_of
from tests.support.training import batches, build, freeze, sleeping_engine, train, whole

pytestmark = pytest.mark.ranks

Found = dict[tuple[Any, ...], dict[str, Any]]


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def named(events: list[dict[str, Any]], step: int) -> Found:
    """Return the events of a batch by process, stage, name without number, and micro-batch."""
    found = {}
    for event in events:
        if event["ph"] == "X" and event["args"]["step"] == step:
            number = event["args"].get("micro_batch")
            what = event["name"].removesuffix(f" {number}")
            found[event["pid"], event["args"]["stage"], what, number] = event
    return found


def check_batch(found: Found, pipelines: int, stages: int, micro_batches: int, error: float) -> None:
    """Check that every pass is there, in an order that its data allow.

    Args:
        error: microseconds by which a rank's clock may be off rank 0's.
    """
    for place in [(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)]:
        events = sorted((e for key, e in found.items() if key[:2] == place), key=lambda e: e["ts"])
        assert all(before["ts"] <= end(before) <= after["ts"] + 0.002 for before, after in zip(events, events[1:]))
        assert {"optimizer step", "share the loss"} <= {event["name"] for event in events}
    for pipeline in range(pipelines):
        for micro_batch in range(micro_batches):
            for stage in range(stages):
                forward = found[pipeline, stage, "forward", micro_batch]
                backward = found[pipeline, stage, "backward", micro_batch]
                assert end(forward) <= backward["ts"]
                if stage:
                    sent = found[pipeline, stage - 1, "send activation", micro_batch]
                    returned = found[pipeline, stage, "send gradient", micro_batch]
                    assert end(found[pipeline, stage - 1, "forward", micro_batch]) <= sent["ts"]
                    assert sent["ts"] - 2 * error < forward["ts"]
                    assert returned["ts"] - 2 * error < found[pipeline, stage - 1, "backward", micro_batch]["ts"]


def train_with_shifted_clocks(path: str, seconds: float) -> list[int]:
    """Train sleeping layers, the last of which are slow, until some move, with different clocks on all ranks."""
    perf_counter, rank = time.perf_counter, torch.distributed.get_rank()
    time.perf_counter = lambda: perf_counter() + seconds * rank
    block = {"interval": 0, "initial_partition": "profile", "profile": {"warmup_batches": 2}}
    block |= {
        "min_improvement": 0.0,  # the first decision may cost anything
        "migration": "blocking",
        "trace": {"path": path, "steps": [2, 4]},
    }
    engine, data = sleeping_engine(block, [0.003] * 6 + [0.02] * 2, torch.distributed.get_world_size())
    for _ in range(5):
        engine.train_batch(data)
        assert "_exec_schedule" not in vars(engine)
    return engine.partition


def test_the_timeline_is_correct_on_ranks_whose_clocks_differ(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "trace.json"
    partitions = run(3, train_with_shifted_clocks, str(path), 1000.0)
    events = read(path)
    names = {(e["name"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")}
    assert names == {("process_name", "pipeline 0"), *(("thread_name", f"stage {stage}") for stage in range(3))}
    markers = [event["args"] for event in events if event["ph"] == "i"]
    assert [marker["step"] for marker in markers] == [2, 3, 4]
    assert markers[0]["partition"] == markers[1]["partition"] != markers[2]["partition"] == partitions[0]
    assert {event["cat"] for event in events if event["ph"] == "X"} <= set(CATEGORIES)
    error = max(marker["clock_error_microseconds"] for marker in markers)
    assert 0 < error < 20_000
    begin = min(e["ts"] for e in events if e["ph"] == "X")
    assert begin == 0 and max(end(e) for e in events if e["ph"] == "X") < 60e6
    for step in (2, 3, 4):
        found = named(events, step)
        check_batch(found, pipelines=1, stages=3, micro_batches=4, error=error)
        assert all(found[0, stage, "forward", 1]["dur"] > 4000 for stage in range(3))
        for what in ("migrate", "decide"):
            assert [(0, stage, what, None) in found for stage in range(3)] == [step == 3] * 3
    # The last stage is the slow one, so the first waits for its gradients.
    wait = named(events, 2)[0, 1, "wait for gradient", 0]
    assert wait["cat"] == "wait" and wait["dur"] > 5000
    received = named(events, 2)[0, 1, "receive gradient", 0]
    assert end(wait) == pytest.approx(received["ts"]) and received["dur"] < wait["dur"]


def test_a_trace_changes_nothing(tmp_path: Path) -> None:
    case = Case(stages=2, replicas=2, tied=True, dropout=True, precision="bf16 zero1")
    path = tmp_path / "trace.json"
    traced = replace(case, dynmo={**(case.dynmo or {}), "trace": {"path": str(path), "steps": [2, 4]}})
    moves = [[0, 2, 8], [0, 7, 8]]
    plain, with_trace = run_each(4, train, (case, moves, 4, 2), (traced, moves, 4, 2))
    assert plain[0]["moved"] > 0
    assert [r["losses"] for r in plain] == [r["losses"] for r in with_trace]
    assert [r["evaluations"] for r in plain] == [r["evaluations"] for r in with_trace]
    assert whole(plain) == whole(with_trace)
    events = read(path)
    assert [event["args"]["partition"] for event in events if event["ph"] == "i"] == [
        *([0, 4, 8], [0, 2, 8], [0, 2, 8])
    ]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        *("pipeline 0", "pipeline 1")
    }
    error = max(event["args"]["clock_error_microseconds"] for event in events if event["ph"] == "i")
    for step in (2, 3, 4):
        check_batch(named(events, step), pipelines=2, stages=2, micro_batches=3, error=error)


def train_half_frozen(path: str) -> None:
    """Train on ranks that were suspended for 0.02 s when they began to record."""
    begin = trace.begin
    trace.begin = lambda clock: (*begin(clock)[:2], 0.01)
    engine, data = sleeping_engine({"interval": 0, "trace": {"path": path, "steps": [2, 2]}}, [0.002] * 4, 2)
    engine.train_batch(data)
    freeze(engine, 2)
    engine.model_changed("half is frozen")
    engine.train_batch(data)


def test_a_frozen_stage_shows_no_backward_pass(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run(2, train_half_frozen, str(path))
    assert all(e["args"]["clock_error_microseconds"] >= 10_000 for e in read(path) if e["ph"] == "i")
    found = named(read(path), 2)
    assert not any((0, 0, "backward", micro_batch) in found for micro_batch in range(4))
    assert all(found[0, 1, "backward", micro_batch]["dur"] > 8000 for micro_batch in range(4))


def train_in_a_v(path: str) -> Schedule:
    """Train two batches, and return the schedule of the second one."""
    block = {"interval": 0, "schedule": {"kind": "v"}, "trace": {"path": path, "steps": [1, 2]}}
    engine = build(Case(blocks=3, micro_batches=3, dynmo=block))
    data = batches(engine)
    engine.train_batch(data), engine.train_batch(data)
    running: Schedule = engine.stage.schedule.running
    return running


def test_the_first_micro_batch_of_a_v_passes_all_chunks_before_the_others_until_messages_are_known(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    schedule, _ = run(2, train_in_a_v, str(path))
    passes = sorted((event for event in read(path) if event.get("cat") == "forward"), key=lambda event: event["ts"])
    for step, expected in ((1, first_batch(schedule)), (2, schedule)):
        for stage, order in enumerate(expected.orders):
            of_stage = [e["args"] for e in passes if (e["args"]["step"], e["args"]["stage"]) == (step, stage)]
            forwards = [(action.chunk, action.micro_batch) for action in order if action.kind == Kind.FORWARD]
            assert [(passed["chunk"], passed["micro_batch"]) for passed in of_stage] == forwards, (step, stage)
    assert first_batch(schedule) != schedule


def offsets_of_shifted_clocks(seconds: float) -> tuple[float, float]:
    """Measure clocks that are ``seconds`` ahead of those of the rank before; ranks are slow to answer now and then."""
    rank, calls = torch.distributed.get_rank(), count()

    def now() -> float:
        if rank in (0, 2) and next(calls) % 3 == 0:
            time.sleep(0.2)
        return time.perf_counter() + seconds * rank

    return Communicator(module_of(Case(stages=4)).mpu(), torch.device("cpu"), 30.0).clock_offset(now)


def test_clock_offsets_are_within_the_reported_error() -> None:
    found = run(4, offsets_of_shifted_clocks, 1000.0, backend="gloo")
    assert found[0] == (0.0, 0.0)
    for rank, (offset, error) in enumerate(found):
        assert abs(offset - 1000.0 * rank) <= error < 0.05


def cannot_write(folder: str) -> tuple[str, int]:
    """Return the error of a path that cannot be written, and the steps trained after a file vanished."""
    trace = {"path": f"{folder}/file/trace.json", "steps": [1, 3]}
    Path(folder, "file").write_text("no folder")
    try:
        build(Case(dynmo={"trace": trace}))
    except ConfigError as error:
        message = str(error)
    path = Path(folder, "lost.json")
    engine = build(Case(dynmo={"interval": 0, "trace": {"path": str(path), "steps": [1, 3]}}))
    data = batches(engine)
    engine.train_batch(data)
    if engine.global_rank == 0:
        path.unlink()
    for _ in range(2):
        engine.train_batch(data)
    return message, engine.global_steps


def test_an_unwritable_file_is_refused_and_a_lost_one_ends_no_training(tmp_path: Path) -> None:
    for message, steps in run(2, cannot_write, str(tmp_path)):
        assert message.startswith(f'dynmo.trace.path = "{tmp_path}/file/trace.json": cannot be written: ')
        assert steps == 3
