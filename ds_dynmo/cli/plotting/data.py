"""Read what a run wrote for ds-dynmo-plot: the JSON lines of a report, the events of a trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ds_dynmo.config import load_json
from ds_dynmo.errors import ConfigError
from ds_dynmo.partitioners import loads, simulate
from ds_dynmo.plan import Profile
from ds_dynmo.schedules import Kind, ScheduleTimeline

Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """The records of one run, each kind in the order of steps; ``start`` and ``end`` are ds-dynmo-train's."""

    start: Record | None
    end: Record | None
    steps: tuple[Record, ...]
    profiles: tuple[Profile, ...]
    rebalances: tuple[Record, ...]
    repacks: tuple[Record, ...] = ()

    @property
    def moves(self) -> tuple[Record, ...]:
        """The decisions by which layers changed stage."""
        return tuple(record for record in self.rebalances if record["old_partition"] != record["new_partition"])

    @property
    def changes(self) -> tuple[Record, ...]:
        """The decisions that followed a change of the model."""
        return tuple(r for r in (*self.rebalances, *self.repacks) if r.get("model_changed"))


PASSES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}


class Bar(NamedTuple):
    """An interval in a row of a timeline, in seconds since the timeline's beginning."""

    category: str
    micro_batch: int | None
    begin_seconds: float
    seconds: float


@dataclass(frozen=True)
class TimelineRows:
    """A timeline to draw: a title, and a name and bars for each row."""

    title: str
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]

    @property
    def seconds(self) -> float:
        return max(bar.begin_seconds + bar.seconds for _, bars in self.rows for bar in bars)


class MoveLoads(NamedTuple):
    """Seconds per micro-batch of each stage, around one move.

    Attributes:
        before, predicted_after: what the decision counted with.
        measured_after: by the first profile under the new partition; None: there is none.
    """

    move: Record
    before: list[float]
    predicted_after: list[float]
    measured_after: list[float] | None


def read_report(path: Path) -> RunRecords:
    """Read the JSON lines that ``dynmo.report`` or ds-dynmo-train wrote.

    Raises:
        ConfigError: no such file, a line that is no record, or nothing in it.
    """
    kinds: dict[str, list[Record]] = {kind: [] for kind in ("start", "step", "rebalance", "repack", "end")}
    profiles: list[Profile] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            kinds.setdefault(record["kind"], []).append(record)
            if record["kind"] == "profile":
                profiles.append(Profile.from_record(record))
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{path}: line {number} is no record of a report: {error!r}") from error
    if not kinds["step"] and not profiles:
        raise ConfigError(f'{path}: has no record of kind "step" or "profile", there is nothing to draw')
    start, end = ([None, *kinds[kind]][-1] for kind in ("start", "end"))
    steps, rebalances, repacks = (tuple(kinds[kind]) for kind in ("step", "rebalance", "repack"))
    return RunRecords(start, end, steps, tuple(profiles), rebalances, repacks)


def loads_around(report: RunRecords) -> list[MoveLoads]:
    """Return the stage loads before and after each move that a profile led to."""
    of_moves = []
    ends = [move["step"] for move in report.moves[1:]] + [float("inf")]
    for move, end in zip(report.moves, ends):
        if move["stage_seconds_before"] is None:
            continue
        later = [profile for profile in report.profiles if move["step"] < profile.step <= end]
        measured = loads(later[0].costs("time"), move["new_partition"]) if later else None
        of_moves.append(MoveLoads(move, move["stage_seconds_before"], move["stage_seconds_after"], measured))
    return of_moves


def simulated(profile: Profile, partition: Sequence[int], title: str) -> TimelineRows:
    """Simulate the 1F1B timeline of a partition from a profile, without time for sending."""
    forward = loads([layer.forward_seconds for layer in profile.layers], partition)
    backward = loads([layer.backward_seconds for layer in profile.layers], partition)
    return rows_of(simulate(forward, backward, profile.micro_batches), title)


def rows_of(timeline: ScheduleTimeline, title: str) -> TimelineRows:
    """Make a row of bars for each stage."""
    rows = []
    for stage, order in enumerate(timeline.schedule.orders):
        spans = zip(order, timeline.start_seconds[stage], timeline.end_seconds[stage])
        bars = (Bar(PASSES[action.kind], action.micro_batch, start, end - start) for action, start, end in spans)
        rows.append((f"stage {stage}", tuple(bars)))
    return TimelineRows(title, tuple(rows))


def read_trace(path: Path) -> list[Record]:
    """Read the events of the trace that ``dynmo.trace`` wrote.

    Raises:
        ConfigError: no such file, or no trace with a batch in it.
    """
    events = load_json(path).get("traceEvents")
    if not isinstance(events, list) or not traced_steps(events):
        raise ConfigError(f'{path}: should be a trace written by "dynmo.trace" with at least one batch in it')
    return events


def traced_steps(events: Iterable[Record]) -> list[int]:
    """List the steps of the batches in a trace."""
    return [event["args"]["step"] for event in events if event["ph"] == "i"]


def traced(events: Sequence[Record], step: int) -> TimelineRows:
    """Make the timeline of one batch of a trace."""
    (marker,) = (event for event in events if event["ph"] == "i" and event["args"]["step"] == step)
    pipelines = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    stages = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows: dict[tuple[int, int], list[Bar]] = {place: [] for place in sorted(stages)}
    for event in events:
        if event["ph"] == "X" and event["args"]["step"] == step:
            begin = (event["ts"] - marker["ts"]) / 1e6
            bar = Bar(_category(event), event["args"].get("micro_batch"), begin, event["dur"] / 1e6)
            rows[event["pid"], event["tid"]].append(bar)
    several = len(pipelines) > 1
    named = tuple((f"{pipelines[place[0]]}, " * several + stages[place], tuple(bars)) for place, bars in rows.items())
    return TimelineRows(f"step {step}, measured: partition {marker['args']['partition']}", named)


def _category(event: Record) -> str:
    """Return the category of an event. A backward pass without weight gradients has another than a whole one."""
    first_part = PASSES[Kind.INPUT_GRADIENT]
    return first_part if event["name"].startswith(first_part) else str(event["cat"])
