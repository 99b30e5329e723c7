"""Write what ds-dynmo-train prints and reports: progress, the closing table, the numbers of the run."""

from __future__ import annotations

import json
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ds_dynmo.cli.command_line import table_lines
from ds_dynmo.cli.training.options import TrainingRun
from ds_dynmo.engine.decide.report_files import record_writer
from ds_dynmo.engine.decide.reporter import KEPT_REPORTS
from ds_dynmo.errors import counted
from ds_dynmo.files import append_line
from ds_dynmo.plan import Profile, RebalanceReport, reports_after

WriteRecord = Callable[[dict[str, Any]], None]

PROGRESS_LINES = 20
LAST_STEPS = 10  # the training loss reported at the end is the mean of so many last steps


@dataclass
class History:
    """Numbers of each step, for the closing table and the report.

    Attributes:
        losses: the language model's training losses, comparable with those of other models.
        auxiliary_losses: losses that training added to them, or 0.
        step_seconds: with what a case does before and after the batch, and a rebalance; without validation and saving.
        ranks: ranks at work in each step.
        stopped: the signal that ended the run early; 0: none.
        decisions: the latest reports, each with the profile of its decision.
    """

    losses: list[float] = field(default_factory=list)
    auxiliary_losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    stopped: int = 0
    decisions: deque[tuple[RebalanceReport, Profile | None]] = field(
        default_factory=partial(deque, maxlen=KEPT_REPORTS)
    )

    def add(self, loss: float, auxiliary_loss: float, seconds: float) -> None:
        """Add the numbers of the next batch."""
        self.losses.append(loss)
        self.auxiliary_losses.append(auxiliary_loss)
        self.step_seconds.append(seconds)

    def decisions_seen(self, engine: Any) -> None:
        """Record every new report with the profile behind it."""
        last = self.decisions[-1][0] if self.decisions else None
        for report in reports_after(last, engine.reports):
            profile = engine.profile
            known = profile is not None and profile.partition == report.old_partition
            self.decisions.append((report, profile if known else None))


class ProgressLines:
    """Prints progress lines on rank 0."""

    def __init__(self, run: TrainingRun, engine: Any) -> None:
        self._first_rank = engine.global_rank == 0
        self._steps, self._always = run.steps, (engine.global_steps + 1, run.stop)
        self._every = max(1, run.steps // PROGRESS_LINES)
        self._tokens = tokens_per_step(run, engine)

    def is_due(self, steps_done: int) -> bool:
        """Return whether a line follows so many steps, whose losses it needs."""
        return steps_done % self._every == 0 or steps_done in self._always

    def step(self, steps_done: int, history: History) -> None:
        """Print the line that is due."""
        seconds = history.step_seconds[-self._every :]
        speed = self._tokens * len(seconds) / sum(seconds)
        losses = _losses(history.losses[-1], history.auxiliary_losses[-1])
        self.say(f"step {steps_done}/{self._steps}: loss {losses}, {speed:,.0f} tokens/s")

    def say(self, line: str) -> None:
        if self._first_rank:
            print(line, flush=True)


def tokens_per_step(run: TrainingRun, engine: Any) -> int:
    return int(engine.train_batch_size()) * run.model.sequence_length


def closing_table(run: TrainingRun, engine: Any, history: History) -> list[str]:
    """Make one line per decision that is kept: what it changed, and measurements before and after."""
    if not history.decisions:
        return []
    tokens = tokens_per_step(run, engine)
    rows = []
    measurements = engine.measurements
    for report, profile in history.decisions:
        measured = [m for m in measurements if report.moved and m.rebalance_step == report.step]
        before = batch_numbers(report, profile, tokens)
        after = ("-", "-", "-")
        if measured:
            first = measured[0]
            after = (f"{tokens / first.batch_seconds:,.0f}", f"{first.bubble_ratio:.2f}", f"{first.imbalance:.2f}")
        if report.moved:
            partition = f"{list(report.old_partition)} -> {list(report.new_partition)}"
        else:
            partition = f"{list(report.old_partition)} kept"
        changes = [f"{old} -> {new}" if report.moved else old for old, new in zip(before, after)]
        rows.append((str(report.step), report.reason, partition, *changes))
    return table_lines(("step", "reason", "partition", "tokens/s", "bubble ratio", "imbalance"), rows)


def repack_lines(engine: Any) -> list[str]:
    """Make one line per re-packing that changed the number of stages."""
    return [
        f"step {report.step} ({report.reason}): {report.old_stages} -> {counted(report.new_stages, 'stage')}, "
        f"{list(report.new_partition)}, in {report.migrate_seconds + report.world_seconds:.2f} s"
        for report in engine.repacks
        if report.old_stages != report.new_stages
    ]


def batch_numbers(report: RebalanceReport, profile: Profile | None, tokens: int) -> tuple[str, str, str]:
    """Return tokens per second, bubble ratio and imbalance at the decision of ``report``."""
    if profile is None or report.imbalance_before is None:
        return ("-", "-", "-")
    speed = f"{tokens / profile.batch_seconds:,.0f}"
    return (speed, f"{profile.bubble_ratio:.2f}", f"{report.imbalance_before:.2f}")


def step_record(run: TrainingRun, engine: Any, step: int, history: History) -> dict[str, Any]:
    """Make the record of batch ``step``, the last one in the history."""
    seconds = history.step_seconds[-1]
    return {
        "kind": "step",
        "step": step,
        "seconds": seconds,
        "tokens_per_second": tokens_per_step(run, engine) / seconds,
        "train_loss": history.losses[-1],
        "auxiliary_loss": history.auxiliary_losses[-1],
    }


def validation_record(history: History) -> dict[str, Any]:
    """Make the record of the last validation."""
    step, loss = history.validation_losses[-1]
    return {"kind": "validation", "step": step, "validation_loss": loss}


def summary(run: TrainingRun, engine: Any, history: History) -> dict[str, Any]:
    """Make the record of the whole run; its seconds do not include validation."""
    seconds = sum(history.step_seconds)
    return {
        "kind": "end",
        "steps": engine.global_steps,
        "partition": engine.partition,
        "tokens_per_second": tokens_per_step(run, engine) * len(history.losses) / seconds,
        "train_seconds": seconds,
        "average_ranks": statistics.fmean(history.ranks),
        "median_step_seconds": statistics.median(history.step_seconds),
        "train_loss": statistics.fmean(history.losses[-LAST_STEPS:]),
        "auxiliary_loss": statistics.fmean(history.auxiliary_losses[-LAST_STEPS:]),
        "first_train_loss": history.losses[0],
        "validation_loss": history.validation_losses[-1][1],
        "validation_losses": history.validation_losses,
    }


def closing_line(history: History, numbers: dict[str, Any]) -> str:
    """Make the last line; ``numbers`` is the result of :func:`summary`."""
    losses = _losses(numbers["train_loss"], numbers["auxiliary_loss"])
    fewer = len(set(history.ranks)) > 1
    ranks = f" on {numbers['average_ranks']:.1f} of {max(history.ranks)} ranks on average" if fewer else ""
    return (
        f"{numbers['tokens_per_second']:,.0f} tokens/s{ranks}, train loss {losses} "
        f"(last {len(history.losses[-LAST_STEPS:])} steps), validation loss {numbers['validation_loss']:.3f}"
    )


def _losses(loss: float, auxiliary: float) -> str:
    return f"{loss:.3f} + auxiliary {auxiliary:.3f}" if auxiliary else f"{loss:.3f}"


def record_nothing(record: dict[str, Any]) -> None:
    """Drop the record, without a report or on another rank than its writer."""


def begin_report(run: TrainingRun) -> list[dict[str, Any]]:
    """Write the first record of the run's report. A new run empties the file first; a resumed one goes on with it.

    The engine has to be built afterwards: it writes records too when it loads a checkpoint at another partition.

    Returns:
        the record if it could not be written: whoever writes the others tries again, and warns.
    """
    if run.report is None:
        return []
    start = {
        "kind": "start",
        "steps": run.steps,
        "first_step": run.first_step,
        "stop_at": run.stop,
        "stages": run.stages,
        "data": run.text.name,
        "model": run.model.model_dump(mode="json"),
        "config": run.settings,
    }
    try:
        if run.resumed is None:
            run.report.write_text("")
        append_line(run.report, json.dumps(start))
    except OSError:
        return [start]
    return []


def continue_report(run: TrainingRun, engine: Any, unwritten: list[dict[str, Any]]) -> WriteRecord:
    """Return a function that appends a record to the run's report, or warns once that it cannot.

    Args:
        unwritten: the records to begin with: what :func:`begin_report` returned.
    """
    if run.report is None:
        return record_nothing
    write: WriteRecord = engine.write_record
    if engine.dynmo is None:  # DeepSpeed's engine reports nothing
        write = record_writer(run.report, lambda said: print(f"ds-dynmo-train: {said}", file=sys.stderr, flush=True))
    for record in unwritten:
        write(record)
    return write
