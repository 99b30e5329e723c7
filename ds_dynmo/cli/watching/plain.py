"""A report as lines of text, where there is no terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from ds_dynmo.cli.watching.lines import duration
from ds_dynmo.cli.watching.run_state import Report, RunState

MOST_LOADS = 8
WINDOW = 5  # tokens/s are the median of so many latest steps


def median_speed(run: RunState) -> float:
    """Return tokens/s; a step in which layers moved does not count more than others."""
    return statistics.median([*run.speeds][-WINDOW:])


class PlainLines:
    """Prints what is new in a report since the last call."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told = 0
        self._status = ""

    def show(self, report: Report) -> None:
        for line in report.history[self._told :]:
            self._say(line)
        self._told = len(report.history)
        status = status_line(report.run)
        if status and status != self._status and not report.run.ended:
            self._say(status)
        self._status = status


def status_line(run: RunState) -> str:
    """Write where the run stands; "" if no record says so."""
    if run.step is None:
        return ""
    parts = []
    if run.losses:
        parts.append(f"loss {loss_text(run)}, {median_speed(run):,.0f} tokens/s")
    if run.placement is not None:
        parts.append(f"partition {run.placement}")
    if loads := run.loads:
        of_stages = ", ".join(map(duration, loads)) if len(loads) <= MOST_LOADS else _between(loads)
        parts.append(f"loads {of_stages} ({measured_text(run)})")
    if run.imbalance is not None:
        parts.append(f"imbalance {run.imbalance:.2f}")
    return f"step {step_text(run)}: " + "; ".join(parts) if parts else ""


def step_text(run: RunState) -> str:
    return f"{run.step}" if run.steps is None else f"{run.step}/{run.steps}"


def measured_text(run: RunState) -> str:
    """Write when layers were measured, and whether that was where they are now."""
    assert run.measurement is not None
    text = f"measured in step {run.measurement.step}"
    return text if run.loads_are_measured else f"layers {text}, before they moved"


def loss_text(run: RunState) -> str:
    auxiliary = f" + auxiliary {run.auxiliary_loss:.3f}" if run.auxiliary_loss else ""
    validation = f", validation {run.validation_loss:.3f}" if run.validation_loss is not None else ""
    return f"{run.losses[-1]:.3f}{auxiliary}{validation}"


def _between(loads: tuple[float, ...]) -> str:
    return f"of {len(loads)} stages {duration(min(loads))} to {duration(max(loads))}"
