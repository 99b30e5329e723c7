"""Events of a trace, made from what ranks recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_dynmo.engine.measure import trace
from ds_dynmo.engine.measure.trace_events import TraceEvent, TraceFile, Track, batch_events, track_names, with_waits
from ds_dynmo.placement import Placement
from tests.support.full_disk import files_of_at_most


def track(stage: int, *events: TraceEvent, replica: int = 0, part: int = 0) -> Track:
    return Track(rank=stage, replica=replica, stage=stage, slice=part, clock_error_seconds=1e-5, events=events)


def test_a_receive_is_split_where_the_neighbour_began_to_send() -> None:
    cases = {  # by the second in which the send began: the parts of a receive from 1 s to 3 s
        0.5: [("receive", 1.0, 3.0)],
        2.5: [("wait", 1.0, 2.5), ("receive", 2.5, 3.0)],
        3.5: [("wait", 1.0, 3.0), ("receive", 3.0, 3.0)],  # clocks may be off
    }
    for sent, expected in cases.items():
        for what, sender, receiver in (("activation", 0, 1), ("gradient", 1, 0)):
            send = track(sender, TraceEvent("send", what, 4, sent, sent + 1, chunk=2))
            receive = track(receiver, TraceEvent("receive", what, 4, 1.0, 3.0, chunk=2))
            cut = with_waits([send, receive])
            assert cut[0] == send
            assert [(e.category, e.begin_seconds, e.end_seconds) for e in cut[1].events] == expected


def test_only_the_send_of_the_received_message_counts() -> None:
    receive = track(1, TraceEvent("receive", "activation", 4, 1.0, 3.0, chunk=0), replica=1, part=1)
    for other in (
        track(0, TraceEvent("send", "activation", 3, 2.0, 2.0, chunk=0), replica=1, part=1),
        track(0, TraceEvent("send", "gradient", 4, 2.0, 2.0, chunk=0), replica=1, part=1),
        track(0, TraceEvent("send", "activation", 4, 2.0, 2.0, chunk=0), replica=0, part=1),
        track(0, TraceEvent("send", "activation", 4, 2.0, 2.0, chunk=0), replica=1, part=0),
        track(0, TraceEvent("send", "activation", 4, 2.0, 2.0, chunk=2), replica=1, part=1),  # its other chunk, in a V
    ):
        assert with_waits([other, receive])[1] == receive


def test_events_are_microseconds_since_the_origin() -> None:
    tracks = [
        track(0, TraceEvent("forward", "forward", 2, 10.0, 10.5, chunk=0)),
        track(1, TraceEvent("reduce", "reduce", None, 11.0, 12)),
    ]
    marker, forward, reduce = batch_events(7, Placement.chain([0, 1, 2]), tracks, origin=10.0)
    assert (marker["name"], marker["ts"]) == ("step 7", 0.0)
    assert marker["args"] == {"step": 7, "partition": (0, 1, 2), "clock_error_microseconds": 10.0}
    assert (forward["name"], forward["ts"], forward["dur"]) == ("forward 2", 0.0, 5e5)
    assert forward["args"] == {"step": 7, "stage": 0, "micro_batch": 2, "chunk": 0}
    assert (reduce["name"], reduce["ts"], reduce["dur"], reduce["tid"]) == ("reduce", 1e6, 1e6, 1)


def test_stages_have_names_and_slices_are_told_apart() -> None:
    names = [e["args"].get("name") for e in track_names([track(0), track(1)]) if e["name"] == "thread_name"]
    assert names == ["stage 0", "stage 1"]
    names = [e["args"].get("name") for e in track_names([track(0), track(0, part=1)]) if e["name"] == "thread_name"]
    assert names == ["stage 0, slice 0", "stage 0, slice 1"]


def test_the_file_is_whole_after_every_batch(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "trace.json"
    path.parent.mkdir()
    path.write_text("an older run's, longer than what comes now" * 10)
    file = TraceFile(path)
    for count in range(4):
        assert json.loads(path.read_text())["traceEvents"] == [{"n": n} for n in range(count)]
        file.append([{"n": count}])


def test_the_file_is_whole_after_a_batch_that_did_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with files_of_at_most(10), pytest.raises(OSError, match=f"File too large: '{path}'"):
        TraceFile(path)
    assert not path.exists()
    file = TraceFile(path)
    file.append([{"n": 0}])
    with files_of_at_most(path.stat().st_size + 5), pytest.raises(OSError, match=f"File too large: '{path}'"):
        file.append([{"n": 1}] * 9)
    assert json.loads(path.read_text())["traceEvents"] == [{"n": 0}]
    file.append([{"n": 2}])
    assert json.loads(path.read_text())["traceEvents"] == [{"n": 0}, {"n": 2}]


def test_a_pause_at_the_beginning_is_part_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may be suspended between reading the accelerator's clock and the host's."""
    host, pauses = [100.0], iter([7.0, 0.25, 3.0])

    class Clock:
        def now(self) -> float:
            host[0] += next(pauses)
            return host[0]

    monkeypatch.setattr(trace.time, "perf_counter", lambda: host[0])
    mark, seconds, error = trace.begin(Clock())
    assert error == 0.125 and abs(seconds - mark) <= error
