"""Write plain lines: one for each event of a report, and one for the state of its run. Pure; ASCII but for reasons."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from ds_dynmo.errors import counted

if TYPE_CHECKING:
    from ds_dynmo.cli.watching.run_state import RunState

Record = dict[str, Any]

MOST_LOADS = 8


def start_line(record: Record) -> str:
    return (
        f"step {record['first_step']}: a run to step {record['stop_at']} in {counted(record['stages'], 'stage')} begins"
    )


def end_line(record: Record) -> str:
    return (
        f"step {record['steps']}: the run has ended: {record['tokens_per_second']:,.0f} tokens/s, training loss "
        f"{record['train_loss']:.3f}, validation loss {record['validation_loss']:.3f}, partition {record['partition']}"
    )


def move_line(record: Record) -> str:
    """Write a move; what matters most comes first, since a terminal may be narrow."""
    text = (
        f"step {record['step']}: {record['old_partition']} -> {record['new_partition']}, "
        f"{record['reason']}: {_moved(record)} in {duration(record['migrate_seconds'])}"
    )
    before, after = record["bottleneck_seconds_before"], record["bottleneck_seconds_after"]
    if before is None or after is None:
        return text
    return f"{text}, predicted bottleneck {duration(before)} -> {duration(after)}"


def repack_line(record: Record) -> str:
    text = f"step {record['step']}: {record['old_partition']} -> {record['new_partition']}, "
    text += f"{record['reason']}: re-packed"
    if record["released_ranks"]:
        text += f", ranks {record['released_ranks']} released"
    return f"{text}, {_moved(record)} in {duration(record['migrate_seconds'] + record['world_seconds'])}"


def decision_line(record: Record) -> str:
    """Write why a decision moved layers or kept them."""
    outcome = "moved" if record["old_partition"] != record["new_partition"] else "kept"
    verdict = record.get("verdict")
    return f"step {record['step']}, {record['reason']}: {outcome}" + (f": {verdict}" if verdict else "")


def status_line(run: RunState) -> str:
    """Write the state of a run; "" without a record."""
    parts = []
    if run.loss is not None:
        parts.append(pace_text(run))
    if run.placement is not None:
        parts.append(f"partition {run.placement}")
    if loads := run.loads:
        of_stages = ", ".join(map(duration, loads)) if len(loads) <= MOST_LOADS else _between(loads)
        parts.append(f"loads {of_stages} ({measured_text(run)})")
    if run.imbalance is not None:
        parts.append(f"imbalance {run.imbalance:.2f}")
    return f"{step_text(run)}: " + "; ".join(parts) if parts else ""


def step_text(run: RunState) -> str:
    return f"step {run.step}" if run.steps is None else f"step {run.step}/{run.steps}"


def pace_text(run: RunState) -> str:
    """Write losses, and the median of tokens/s, so that a step in which layers moved counts like others."""
    auxiliary = f" + auxiliary {run.auxiliary_loss:.3f}" if run.auxiliary_loss else ""
    validation = f", validation {run.validation_loss:.3f}" if run.validation_loss is not None else ""
    return f"loss {run.loss:.3f}{auxiliary}{validation}, {statistics.median(run.speeds):,.0f} tokens/s"


def measured_text(run: RunState) -> str:
    """Write when layers were measured, and whether that was where they are now."""
    assert run.measurement is not None
    text = f"measured in step {run.measurement.step}"
    return text if run.loads_are_measured else f"{text}, before layers moved"


def duration(seconds: float) -> str:
    """Write seconds with three digits and a unit.

    >>> duration(12.34), duration(0.0193), duration(2e-5), duration(0)
    ('12.3 s', '19.3 ms', '20 us', '0 us')
    """
    value, unit = (
        (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms") if seconds >= 1e-3 else (1e6 * seconds, "us")
    )
    return f"{value:,.0f} {unit}" if value >= 100 or unit == "us" else f"{value:.1f} {unit}"


def printable(text: str) -> str:
    """Replace what would control a terminal: a model may give any reason."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _moved(record: Record) -> str:
    return f"{counted(record['layers_moved'], 'layer')}, {record['bytes_moved'] / 2**20:.1f} MiB"


def _between(loads: tuple[float, ...]) -> str:
    return f"of {len(loads)} stages {duration(min(loads))} to {duration(max(loads))}"
