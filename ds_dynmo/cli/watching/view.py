"""A report as bars for stages and lines for the rest, as wide and as high as the terminal. Needs rich."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

from ds_dynmo.cli.watching.lines import duration
from ds_dynmo.cli.watching.plain import loss_text, median_speed, step_text
from ds_dynmo.cli.watching.run_state import Report

EIGHTHS = " ▏▎▍▌▋▊▉█"
HEIGHTS = "▁▂▃▄▅▆▇█"
MOST_EVENTS = 8
LEAST_BAR, LEAST_SPARKLINE = 4, 8
MOST_SPARKLINE = 60

Line = Text


class View:
    """The report as it is now.

    Args:
        name: of the file.
        note: what is to be said of the file, such as how long ago it was written.
    """

    def __init__(self, report: Report, name: str, note: str) -> None:
        self._report, self._run, self._name, self._note = report, report.run, name, note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Draw as many lines as fit: what is most important comes first, and every stage only if there is room."""
        width, ascii_only = options.max_width, options.ascii_only
        head = [*self._head(width, ascii_only)]
        tail = [*self._decisions()]
        events = [Text(line, style="dim") for line in self._report.history[-MOST_EVENTS:][::-1]]
        rows = len(self._run.loads)
        if options.height is not None:
            rows = max(1, options.height - len(head) - len(tail) - 3 - min(len(events), 3))
        lines = [*head, *self._stages(width, ascii_only, rows), *tail]
        if events:
            lines += [Text(), *events]
        for line in lines if options.height is None else lines[: options.height]:
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

    def _stages(self, width: int, ascii_only: bool, rows: int) -> Iterator[Line]:
        """Draw a bar for each stage; if there are more than rows, for those with the largest loads."""
        run = self._run
        if run.placement is None or not run.loads:
            return
        assert run.measurement is not None
        how = "measured" if run.loads_are_measured else "predicted"
        yield Text()
        yield Text(f"{how} stage loads per micro-batch, profile of step {run.measurement.step}", style="dim")
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


def _series(name: str, value: str, numbers: Sequence[float] | Iterable[float], width: int, ascii_only: bool) -> Line:
    """Draw the latest number, and as many before it as there is room for."""
    line = Text.assemble(name, (value, "bold"))
    room = min(width - len(line) - 2, MOST_SPARKLINE)
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
