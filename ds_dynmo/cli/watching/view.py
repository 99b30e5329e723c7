"""Draw a report: the state of its run, a table with a row for each stage, and the last events. Needs rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ds_dynmo.cli.watching.lines import duration, measured_text, pace_text, step_text
from ds_dynmo.cli.watching.run_state import ReportState, RunState

MOST_EVENTS = 8
OTHER_LINES = 12  # above and below the rows of the table; those that the terminal lacks are cut at its end
LEAST_ROWS = 3


def view(report: ReportState, name: str, note: str, height: int | None = None) -> Group:
    """Draw the report as it is now.

    Args:
        name: of the file.
        note: what is to be said of the file, such as how long ago it was written.
        height: lines of the terminal; None: it scrolls.
    """
    lines: list[Text | Table] = [Text.assemble((name, "bold"), "  ", (note, "dim"))]
    lines += map(Text, _state(report))
    if report.run.loads:
        most = len(report.run.loads) if height is None else max(LEAST_ROWS, height - OTHER_LINES)
        lines += [Text(), _stages(report.run, most), Text()]
    lines += (Text(line, style="dim") for line in report.history[-MOST_EVENTS:][::-1])
    return Group(*lines)


def _state(report: ReportState) -> Iterator[str]:
    run = report.run
    if run.step is not None:
        said = [step_text(run), *(["ended"] if run.ended else []), *([pace_text(run)] if run.loss is not None else [])]
        if run.loss is None and run.measurement is not None:
            said.append(f"a batch takes {duration(run.measurement.batch_seconds)}")
        yield ", ".join(said)
    if run.placement is not None:
        text = f"partition {run.placement}"
        if run.imbalance is not None:
            text += f", imbalance {run.imbalance:.2f}"
        if run.measurement is not None and run.loads_are_measured:
            text += f", bubble ratio {run.measurement.bubble_ratio:.2f}"
        yield text + (f", loads {measured_text(run)}" if run.loads else "")
    if run.schedule:
        yield f"schedule {run.schedule}"
    if run.decision:
        yield run.decision + (f"; {run.moves} of {run.decisions} decisions moved layers" if run.decisions else "")
    if report.skipped:
        yield "1 line is no record" if report.skipped == 1 else f"{report.skipped} lines are no records"


def _stages(run: RunState, most: int) -> Table:
    """Make a row for each stage, or for the ``most`` with the largest loads."""
    placement, loads = run.placement, run.loads
    assert placement is not None
    table = Table(box=None, expand=True, pad_edge=False)
    table.add_column("stage", justify="right", style="bold", no_wrap=True, overflow="crop")
    table.add_column("layers", no_wrap=True, overflow="crop")
    table.add_column("load per micro-batch", no_wrap=True, overflow="crop", ratio=1)
    table.add_column(justify="right", no_wrap=True, overflow="crop")
    shown, largest = _most_loaded(loads, most), max(loads)
    for stage in shown:
        bar = ProgressBar(largest or 1.0, loads[stage], complete_style="cyan", finished_style="yellow")
        layers = ", ".join(_range(chunk) for chunk in placement.chunks_of(stage))
        table.add_row(str(stage), layers, bar, duration(loads[stage]))
    if len(shown) < len(loads):
        table.add_row("...", "", f"{len(loads) - len(shown)} stages with smaller loads", "", style="dim")
    return table


def _most_loaded(loads: Sequence[float], most: int) -> Sequence[int]:
    """Choose the stages that are shown, in their order."""
    if len(loads) <= most:
        return range(len(loads))
    return sorted(sorted(range(len(loads)), key=lambda stage: loads[stage], reverse=True)[: most - 1])


def _range(chunk: range) -> str:
    if not chunk:
        return "none"
    return f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else f"{chunk[0]}"
