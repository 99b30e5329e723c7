"""Make timelines to draw: of simulated batches, from what a report has, and of those in a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ds_dynmo.cli.run_records import Record, RunRecords
from ds_dynmo.config import DynMoConfig, load_json
from ds_dynmo.engine.decide.decision_input import DecisionInput
from ds_dynmo.errors import ConfigError
from ds_dynmo.partitioners import loads, simulate
from ds_dynmo.placement import Placement
from ds_dynmo.plan import Profile
from ds_dynmo.schedules import Kind, Schedule, ScheduleTimeline, replay

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


def around(report: RunRecords, step: int | None) -> list[TimelineRows]:
    """Simulate a batch before and after a decision.

    Args:
        step: of the decision; None: the last one that changed what runs, else the last one. Without any, one batch is
            simulated as the last profile was measured.

    Returns:
        Nothing if no profile had been measured before.

    Raises:
        ConfigError: no decision was made at ``step``.
    """
    if step is not None:
        chosen = [decision for decision in report.decisions if decision.step == step]
        if not chosen:
            steps = ", ".join(str(decision.step) for decision in report.decisions) or "none"
            raise ConfigError(f"--decision {step}: decisions of this run were made at steps {steps}")
    else:
        chosen = [decision for decision in report.decisions if decision.changed] or list(report.decisions)
    if not chosen:
        last = report.profiles[-1:]
        return [simulated(profile, profile.partition, report.order, f"step {profile.step}") for profile in last]
    decision = chosen[-1]
    profile = next((known for known in reversed(report.profiles) if known.step <= decision.step), None)
    if profile is None:
        return []
    step, record = decision.step, decision.record
    before = simulated(profile, record["old_partition"], decision.order_before, f"before step {step}")
    if not decision.changed:
        return [before]
    return [before, simulated(profile, record["new_partition"], decision.order_after, f"after step {step}")]


def simulated(profile: Profile, partition: Sequence[int], order: Schedule | None, when: str) -> TimelineRows:
    """Simulate a batch from a profile, without time for sending.

    Args:
        order: None: DeepSpeed's 1F1B.
    """
    if order is None:
        forward = loads([layer.forward_seconds for layer in profile.layers], partition)
        backward = loads([layer.backward_seconds for layer in profile.layers], partition)
        timeline, name = simulate(forward, backward, profile.micro_batches), "1F1B"
    else:
        passes = DecisionInput.of(profile, config=DynMoConfig(), searches=True).pipeline.passes
        assert passes is not None
        timeline = replay(order, passes.on(order.num_stages).costs(Placement.of(partition, order.owners)))
        name = f"zero bubble, {order.splits} split passes"
    return rows_of(timeline, f"{when}, simulated: {list(partition)}, {name}")


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
    named = tuple(
        (f"{pipelines[place[0]]}, " * several + stages[place], tuple(bars))
        for place, bars in rows.items()
        if bars  # nothing may have travelled in this batch
    )
    return TimelineRows(f"step {step}, measured: {marker['args']['partition']}", named)


def _category(event: Record) -> str:
    """Return the category of an event. A backward pass without weight gradients has another than a whole one."""
    first_part = PASSES[Kind.INPUT_GRADIENT]
    return first_part if event["name"].startswith(first_part) else str(event["cat"])
