"""A report as bars for stages and lines for the rest, as wide and as high as the terminal. Needs rich."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

from ds_dynmo.cli.watching.lines import duration
from ds_dynmo.cli.watching.plain import loss_text, measured_text, median_speed, step_text
from ds_dynmo.cli.watching.run_state import Report

EIGHTHS = " ▏▎▍▌▋▊▉█"
HEIGHTS = "▁▂▃▄▅▆▇█"
MOST_EVENTS = 8
LEAST_BAR, LEAST_SPARKLINE = 4, 8
MOST_SPARKLINE = 60
LEAST_EVENT_LINES = 3  # if there are so many, stages are left out for them
LEAST_WRAPPED, INDENT = 20, "  "  # a line is not wrapped to fewer columns

Line = Text


class View:
    """The report as it is now.

    Args:
        name: of the file.
        note: what is to be said of the file, such as how long ago it was written.
        height: lines of the terminal; None: it scrolls.
    """

    def __init__(self, report: Report, name: str, note: str, height: int | None = None) -> None:
        self._report, self._run, self._name, self._note, self._height = report, report.run, name, note, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Line]:
        """Draw as many lines as fit: what is most important comes first, and every stage only if there is room."""
        width, height, ascii_only = options.max_width, self._height, options.ascii_only  # Live tells no height

        def wrapped(lines: Iterable[Line]) -> list[Line]:
            return [part for line in lines for part in _wrap(line, console, width)]

        head, tail = [*self._head(width, ascii_only), *self._stages_head()], [*self._decisions()]
        events = wrapped(Text(line, style="dim") for line in self._report.history[-MOST_EVENTS:][::-1])
        rows, rest = len(self._run.loads), 1 + min(len(events), LEAST_EVENT_LINES)
        if height is None or len(wrapped(head)) + rows + len(wrapped(tail)) + rest <= height:
            head, tail = wrapped(head), wrapped(tail)  # else the ends of lines are cut
        else:
            rows = max(1, height - len(head) - len(tail) - rest)
        lines = [*head, *self._stages(width, ascii_only, rows), *tail]
        if events:
            lines += [Text(), *events]
        for line in lines[:height]:
            line.no_wrap = True
            line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
            yield line

    def _head(self, width: int, ascii_only: bool) -> Iterator[Line]:
        run = self._run
        yield Text.assemble((self._name, "bold"), "  ", (self._note, "dim"))
        if run.step is not None:
            ended = ", ended" if run.ended else ""
            yield Text(f"step {step_text(run)}{ended}")
        if run.losses:
            yield _series("tokens/s ", f"{median_speed(run):,.0f}", run.speeds, width, ascii_only)
            yield _series("loss     ", loss_text(run), run.losses, width, ascii_only)
        elif run.measurement is not None:
            yield Text.assemble("batch    ", (duration(run.measurement.batch_seconds), "bold"))

    def _stages_head(self) -> Iterator[Line]:
        if self._run.loads:
            yield Text()
            yield Text(f"stage, layers, load per micro-batch ({measured_text(self._run)})", style="dim")

    def _stages(self, width: int, ascii_only: bool, rows: int) -> Iterator[Line]:
        """Draw a bar for each stage; if there are more than rows, for those with the largest loads."""
        run = self._run
        if run.placement is None or not run.loads:
            return
        loads, placement = run.loads, run.placement
        shown, left_out = _most_loaded(loads, rows)
        layers = {stage: ",".join(_range(chunk) for chunk in placement.chunks_of(stage)) for stage in shown}
        names = {stage: f"{stage:>{len(str(max(shown)))}}" for stage in shown}
        column = max(map(len, layers.values()))
        seconds = {stage: duration(loads[stage]) for stage in shown}
        right = max(map(len, seconds.values()))
        bar = width - len(names[shown[0]]) - column - right - 3
        if bar < LEAST_BAR:  # a narrow terminal: which layers they are is left out first
            bar, column = bar + column + 1, 0
        for stage in shown:
            most = loads[stage] == max(loads)
            yield Text.assemble(
                (names[stage], "bold"),
                f" {layers[stage]:<{column}} " if column else " ",
                (_bar(loads[stage] / max(loads) if max(loads) else 0.0, bar, ascii_only), "yellow" if most else "cyan"),
                f" {seconds[stage]:>{right}}",
            )
        if left_out:
            least, most_of_them = min(loads[stage] for stage in left_out), max(loads[stage] for stage in left_out)
            yield Text(f"{len(left_out)} more: {duration(least)} to {duration(most_of_them)}", style="dim")

    def _decisions(self) -> Iterator[Line]:
        run = self._run
        if run.placement is not None:
            text = f"partition {run.placement}"
            if run.imbalance is not None:
                text += f", imbalance {run.imbalance:.2f}"
            if run.measurement is not None and run.loads_are_measured:
                text += f", bubble ratio {run.measurement.bubble_ratio:.2f}"
            yield Text(text)
        if run.schedule:
            yield Text(f"schedule {run.schedule}")
        if run.decision:
            moved = f"; {run.moves} of {run.decisions} decisions moved layers" if run.decisions else ""
            yield Text(run.decision + moved)
        if self._report.skipped:
            lines = (
                "1 line is no record" if self._report.skipped == 1 else f"{self._report.skipped} lines are no records"
            )
            yield Text(lines, style="red")


def _wrap(line: Line, console: Console, width: int) -> list[Line]:
    """Break a line that is wider than the terminal; what follows is indented, so that it reads as one."""
    if line.cell_len <= width or width < LEAST_WRAPPED:
        return [line]
    first, *rest = parts = line.wrap(console, width - len(INDENT))
    for part in parts:
        part.rstrip()
    return [first, *(Text.assemble(INDENT, part) for part in rest)]


def _series(name: str, value: str, numbers: Iterable[float], width: int, ascii_only: bool) -> Line:
    """Draw the latest number, and as many before it as there is room for."""
    line = Text.assemble(name, (value, "bold"))
    room = min(width - line.cell_len - 2, MOST_SPARKLINE)
    if room >= LEAST_SPARKLINE and not ascii_only:
        line.append("  " + _sparkline([*numbers][-room:]), style="cyan")
    return line


def _sparkline(numbers: Sequence[float]) -> str:
    finite = [number for number in numbers if math.isfinite(number)]
    if not finite:
        return ""
    least, most = min(finite), max(finite)
    scale = (len(HEIGHTS) - 1) / (most - least) if most > least else 0.0
    return "".join(HEIGHTS[round(scale * (one - least))] if math.isfinite(one) else " " for one in numbers)


def _bar(share: float, width: int, ascii_only: bool) -> str:
    """Draw a bar over ``share`` of ``width`` columns, and spaces over the rest."""
    if width < LEAST_BAR:
        return ""
    if ascii_only:
        return ("#" * round(share * width)).ljust(width)
    full, eighth = divmod(round(8 * share * width), 8)
    return ("█" * full + (EIGHTHS[eighth] if eighth else "")).ljust(width)


def _range(chunk: range) -> str:
    if not chunk:
        return "none"
    return f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else f"{chunk[0]}"


def _most_loaded(loads: Sequence[float], rows: int) -> tuple[list[int], list[int]]:
    """Choose the stages that are shown in ``rows``, in their order, and those that are left out; a row says which."""
    stages = range(len(loads))
    if len(loads) <= rows:
        return [*stages], []
    kept = sorted(stages, key=lambda stage: loads[stage], reverse=True)[: max(1, rows - 1)]
    return sorted(kept), [stage for stage in stages if stage not in kept]
