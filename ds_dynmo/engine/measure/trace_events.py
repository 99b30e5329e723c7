"""Trace files in Chrome's trace format, which Perfetto and chrome://tracing open.

A pipeline (one data-parallel replica) is a process, and a rank in it a thread, with another for its transfers. Each
event has ``ph`` "X", microseconds and a category of :data:`CATEGORIES`. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ds_dynmo.files import overwrite, write_text
from ds_dynmo.placement import Placement

CATEGORIES = (
    *("forward", "backward", "weight gradient", "load", "send", "receive", "wait", "reduce", "optimizer step"),
    "instruction",  # of a kind that DeepSpeed does not have
    *("loss", "profile", "decide", "migrate"),
    "transfer",  # of layers while a batch trains, on a track of its own beside that of the rank
)
TRANSFERS = 1_000_000  # added to a rank: the number of its track of transfers
_END = "\n]}\n"


class TraceEvent(NamedTuple):
    """A pass, message or phase of a rank, in seconds of a clock that all ranks share.

    Attributes:
        chunk: of layers; of a message, the one before the boundary that it crosses.
    """

    category: str
    what: str
    micro_batch: int | None
    begin_seconds: float
    end_seconds: float
    chunk: int | None = None


@dataclass(frozen=True)
class Track:
    """The events of one rank in one batch.

    Attributes:
        clock_error_seconds: error bound of its times relative to rank 0's.
    """

    rank: int
    replica: int
    stage: int
    slice: int
    clock_error_seconds: float
    events: tuple[TraceEvent, ...]


def with_waits(tracks: Sequence[Track]) -> list[Track]:
    """Split each receive at the start of the neighbour's send; the first part is a wait."""
    sends = {
        (track.replica, track.slice, event.what, event.chunk, event.micro_batch): event.begin_seconds
        for track in tracks
        for event in track.events
        if event.category == "send"
    }
    split = []
    for track in tracks:
        events: list[TraceEvent] = []
        for event in track.events:
            sent = sends.get((track.replica, track.slice, event.what, event.chunk, event.micro_batch))
            if event.category != "receive" or sent is None or sent <= event.begin_seconds:
                events.append(event)
                continue
            arrives = min(sent, event.end_seconds)
            events.append(event._replace(category="wait", end_seconds=arrives))
            events.append(event._replace(begin_seconds=arrives))
        split.append(Track(**{**vars(track), "events": tuple(events)}))
    return split


def batch_events(step: int, placement: Placement, tracks: Sequence[Track], origin: float) -> list[dict[str, Any]]:
    """Return the events of one batch: a marker at its start, with its partition, and those of all ranks.

    Args:
        origin: seconds of time 0 in the file.
    """
    beginning = min(event.begin_seconds for track in tracks for event in track.events)
    marker = {
        **{"name": f"step {step}", "ph": "i", "s": "g", "ts": _microseconds(beginning - origin)},
        **{"pid": min(track.replica for track in tracks), "tid": min(track.rank for track in tracks)},
        "args": {
            "step": step,
            **placement.as_record("partition"),
            "clock_error_microseconds": _microseconds(max(track.clock_error_seconds for track in tracks)),
        },
    }
    return [
        marker,
        *(_transfer_name(track) for track in tracks if any(event.category == "transfer" for event in track.events)),
        *(_complete(step, track, event, origin) for track in with_waits(tracks) for event in track.events),
    ]


def _transfer_name(track: Track) -> dict[str, Any]:
    place = {"pid": track.replica, "tid": TRANSFERS + track.rank}
    return {"ph": "M", "name": "thread_name", **place, "args": {"name": f"stage {track.stage}, transfers"}}


def _complete(step: int, track: Track, event: TraceEvent, origin: float) -> dict[str, Any]:
    numbers = {"micro_batch": event.micro_batch, "chunk": event.chunk}
    return {
        "name": " ".join(str(part) for part in (_verb(event), event.micro_batch) if part is not None),
        "cat": event.category,
        "ph": "X",
        "ts": _microseconds(event.begin_seconds - origin),
        "dur": _microseconds(event.end_seconds - event.begin_seconds),
        "pid": track.replica,
        "tid": track.rank + (TRANSFERS if event.category == "transfer" else 0),
        "args": {"step": step, "stage": track.stage, **{k: n for k, n in numbers.items() if n is not None}},
    }


def _verb(event: TraceEvent) -> str:
    if event.category in ("send", "receive"):
        return f"{event.category} {event.what}"
    return f"wait for {event.what}" if event.category == "wait" else event.what


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e9) / 1e3


def track_names(tracks: Iterable[Track]) -> list[dict[str, Any]]:
    """Return the events that name and order the tracks."""
    tracks = list(tracks)
    sliced = len({track.slice for track in tracks}) > 1
    named: list[dict[str, Any]] = []
    for replica in sorted({track.replica for track in tracks}):
        named.append({"name": "process_name", "pid": replica, "args": {"name": f"pipeline {replica}"}})
    for track in tracks:
        place = {"pid": track.replica, "tid": track.rank}
        name = f"stage {track.stage}" + (f", slice {track.slice}" if sliced else "")
        named.append({"name": "thread_name", **place, "args": {"name": name}})
        order = track.stage * len(tracks) + track.slice
        named.append({"name": "thread_sort_index", **place, "args": {"sort_index": order}})
    return [{"ph": "M", **event} for event in named]


class TraceFile:
    """A trace file that is complete JSON after each batch, even if a write fails.

    Attributes:
        empty: whether no events were written yet.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.empty = True
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, '{"displayTimeUnit": "ms", "traceEvents": [' + _END)

    def append(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Append ``events``."""
        lines = ",\n".join(json.dumps(event) for event in events)
        end = self._path.stat().st_size - len(_END)
        overwrite(self._path, end, ("\n" if self.empty else ",\n") + lines + _END)
        self.empty = False
