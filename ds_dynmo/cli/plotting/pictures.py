"""The pictures of ds-dynmo-plot, each a matplotlib figure."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ds_dynmo.cli.plotting.data import PASSES, MoveLoads, RunRecords, TimelineRows, loads_around
from ds_dynmo.errors import counted
from ds_dynmo.partitioners import imbalance

COLUMNS, MOST_MOVES = 3, 12
MOST_TALL_ROWS = 8
WINDOW = 5  # steps of the running median of tokens/s
PROFILED = ("profiled batches", "o-", "batch (s)")
MILLI = 1e3
BEFORE, PREDICTED, MEASURED = "#b0b7c3", "#9ecae9", "#2a6fb0"
MOVE = "#c0392b"
NEVER = "#6a6a6a"
COLORS = {
    "forward": "#4c8ed9",
    "backward": "#2f9e6e",
    "input gradient": "#1d7a70",
    "weight gradient": "#a9cf54",
    "load": "#8e6bbf",
    "send": "#e8a838",
    "receive": "#d9763f",
    "wait": "#e6e6e6",
    "instruction": "#a3c76d",
    "reduce": "#c65b9b",
    "optimizer step": "#7b3f2a",
    "loss": "#6a6a6a",
    "profile": "#16b5c4",
    "decide": "#f2d13c",
    "migrate": "#d62728",
}


def svg(figure: Figure) -> bytes:
    """Draw a figure as SVG: the same bytes each time, and text as text, so that the file is small."""
    drawn = io.BytesIO()
    one_font = {"font.sans-serif": ["DejaVu Sans"]}  # every text names all of them
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_dynmo", **one_font}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def stage_loads(report: RunRecords) -> Figure | None:
    """Draw stage loads before and after each move; of many moves, those that lowered the bottleneck most."""
    moves = loads_around(report)
    if not moves:
        return None
    chosen = sorted(moves, key=lambda loads: max(loads.predicted_after) - max(loads.before))[:MOST_MOVES]
    chosen.sort(key=lambda loads: loads.move["step"])
    columns = min(COLUMNS, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    figure = Figure(figsize=(max(6.0, 4.3 * columns), 3.4 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, loads in zip(grid.flat, chosen):
        _loads_of_one_move(axes, loads)
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel("load per micro-batch (ms)")
    bars = [("before", BEFORE), ("after, predicted", PREDICTED), ("after, measured", MEASURED)]
    figure.legend(handles=[Patch(color=color, label=name) for name, color in bars], loc="outside upper center", ncols=3)
    if len(moves) > len(chosen):
        figure.supxlabel(f"the {len(chosen)} of {len(moves)} moves that lowered the bottleneck most", fontsize=9)
    return figure


def _loads_of_one_move(axes: Any, loads: MoveLoads) -> None:
    series = [(loads.before, BEFORE), (loads.predicted_after, PREDICTED)]
    series += [(loads.measured_after, MEASURED)] if loads.measured_after is not None else []
    width = 0.8 / 3
    for number, (seconds, color) in enumerate(series):
        places = [stage + (number - 1) * width for stage in range(len(seconds))]
        axes.bar(places, [MILLI * load for load in seconds], width, color=color)
    axes.set_xlabel("stage")
    axes.set_xlim(-0.6, len(loads.before) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    old, new = (_short(loads.move[which]) for which in ("old_partition", "new_partition"))
    axes.set_title(f"step {loads.move['step']}: {loads.move['reason']}\n{old} to {new}", fontsize=9)
    plain(axes)


def _short(numbers: Sequence[int]) -> str:
    if len(numbers) <= 7:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[:3]))}, ..., {numbers[-1]}]"


def speed(report: RunRecords) -> Figure:
    """Draw tokens per second of each step (or seconds of the profiled batches), imbalance and bubble ratio."""
    panels = 2 if report.profiles else 1
    figure = Figure(figsize=(9, 2.8 * panels), layout="constrained")
    upper, *lower = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    _pace(upper, report)
    for axes in lower:
        steps = [profile.step for profile in report.profiles]
        imbalances = [imbalance(profile.costs("time"), profile.partition) for profile in report.profiles]
        bubbles = [profile.bubble_ratio for profile in report.profiles]
        axes.plot(steps, imbalances, "o-", color=COLORS["receive"], markersize=4, label="imbalance of loads")
        axes.plot(steps, bubbles, "s-", color=COLORS["load"], markersize=4, label="bubble ratio")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ratio")
    _over_steps(upper, *lower, report=report)
    return figure


def ranks(report: RunRecords, never: RunRecords | None = None) -> Figure | None:
    """Draw ranks at work over the run, its speed, and where the model changed; None where it did not re-pack.

    Args:
        never: of the same run without re-packing, whose speed is drawn too.
    """
    changes = [record for record in report.repacks if record["old_partition"] != record["new_partition"]]
    if not changes:
        return None
    numbers, _ = _points(report)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    at = [numbers[0], *(change["step"] for change in changes), numbers[-1]]
    stages = [len(changes[0]["old_partition"]) - 1, *(len(change["new_partition"]) - 1 for change in changes)]
    upper.step(at, [*stages, stages[-1]], where="post", color=MEASURED, linewidth=2)
    for change in changes:
        left = f"{len(change['old_partition']) - 1} to {counted(len(change['new_partition']) - 1, 'stage')}"
        upper.annotate(left, (change["step"], len(change["old_partition"]) - 1), (6, -4), textcoords="offset points")
    upper.fill_between(at, [*stages, stages[-1]], step="post", color=PREDICTED, alpha=0.5)
    upper.set_ylim(0, max(stages) + 0.5)
    upper.yaxis.set_major_locator(MaxNLocator(integer=True))
    upper.set_ylabel("stages at work")
    if never is not None:
        lower.plot(*_points(never), color=NEVER, linewidth=2, label="never re-packed")
    _pace(lower, report)
    for axes in (upper, lower):
        _mark_changes(axes, report)
        plain(axes)
    lower.set_xlabel("step")
    lower.legend(loc="lower left", facecolor="white", edgecolor="none", framealpha=1, fontsize=9, ncols=4)
    return figure


def _mark_changes(axes: Any, report: RunRecords) -> None:
    """Mark the decisions that followed a change of the model, with the words before a colon as their name."""
    names = ", ".join(dict.fromkeys(str(change["reason"]).split(":")[0] for change in report.changes))
    for number, change in enumerate(report.changes):
        axes.axvline(change["step"], color=MOVE, linewidth=1, linestyle=":", label=None if number else names)


def _pace(axes: Any, report: RunRecords) -> None:
    """Draw tokens per second of each step and their running median, or the seconds of profiled batches."""
    if report.steps:
        tokens = [(record["step"], record["tokens_per_second"]) for record in report.steps]
        axes.plot(*zip(*tokens), color=PREDICTED, linewidth=1, label="each step")
        axes.yaxis.set_major_formatter("{x:,.0f}")
    name, line, unit = (f"median of {WINDOW} steps", "-", "tokens/s") if report.steps else PROFILED
    axes.plot(*_points(report), line, color=MEASURED, linewidth=2, markersize=4, label=name)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)


def _points(report: RunRecords) -> tuple[list[int], list[float]]:
    """Return steps and the running median of tokens per second, or profiled steps and the seconds of a batch."""
    if not report.steps:
        return [profile.step for profile in report.profiles], [profile.batch_seconds for profile in report.profiles]
    tokens, half = [record["tokens_per_second"] for record in report.steps], WINDOW // 2
    smooth = [statistics.median(tokens[max(0, at - half) : at + half + 1]) for at in range(len(tokens))]
    return [record["step"] for record in report.steps], smooth


def losses(report: RunRecords) -> Figure | None:
    """Draw the training loss of each step, auxiliary loss where there is one, and validation losses."""
    if not report.steps:
        return None
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    numbers = [record["step"] for record in report.steps]
    axes.plot(numbers, [r["train_loss"] for r in report.steps], color=MEASURED, linewidth=1.2, label="training")
    if any(record["auxiliary_loss"] for record in report.steps):
        auxiliary = [record["auxiliary_loss"] for record in report.steps]
        axes.plot(numbers, auxiliary, color=COLORS["load"], linewidth=1.2, label="auxiliary")
    if report.end is not None:
        points = report.end["validation_losses"]
        axes.plot(*zip(*points), "D", color=COLORS["receive"], markersize=5, label="validation")
    axes.set_ylabel("loss")
    _over_steps(axes, report=report)
    return figure


def _over_steps(*panels: Any, report: RunRecords) -> None:
    """Mark where layers moved, and put a legend outside and an axis of steps."""
    for axes in panels:
        for number, move in enumerate(report.moves):
            label = "layers moved" if number == 0 and axes is panels[0] else None
            axes.axvline(move["step"] + 0.5, color=MOVE, linewidth=1, linestyle="--", alpha=0.7, label=label)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
        plain(axes)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))


def timelines(batches: Sequence[TimelineRows], *, in_passes: bool = False) -> Figure:
    """Draw batches below each other on one scale of time; a row for each stage.

    Args:
        in_passes: time is counted in forward passes, else in milliseconds.
    """
    per_second, unit = (1.0, "forward passes") if in_passes else (MILLI, "ms")
    rows = [len(batch.rows) for batch in batches]
    inches = 0.42 if max(rows) <= MOST_TALL_ROWS else 0.22
    figure = Figure(figsize=(10, sum(inches * count + 0.8 for count in rows) + 0.9), layout="constrained")
    panels = figure.subplots(len(batches), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    longest = per_second * max(batch.seconds for batch in batches)
    for axes, batch in zip(panels, batches):
        for place, (_, bars) in enumerate(batch.rows):
            for category in COLORS:
                spans = [
                    (per_second * bar.begin_seconds, per_second * bar.seconds)
                    for bar in bars
                    if bar.category == category
                ]
                edge = {"edgecolor": "white", "linewidth": 0.4} if category in PASSES.values() else {}
                axes.broken_barh(spans, (place - 0.4, 0.8), facecolor=COLORS[category], **edge)
            for bar in bars:
                if bar.category in PASSES.values() and per_second * bar.seconds > 0.015 * longest:
                    middle = per_second * (bar.begin_seconds + bar.seconds / 2)
                    text = str(bar.micro_batch)
                    axes.text(middle, place, text, color="white", ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(batch.rows)), [name for name, _ in batch.rows])
        axes.set_ylim(len(batch.rows) - 0.4, -0.6)
        axes.set_xlim(0, longest)
        axes.set_title(f"{batch.title}, {per_second * batch.seconds:,.0f} {unit}", fontsize=10, loc="left")
        plain(axes)
    panels[-1].set_xlabel(f"{unit} since the batch began")
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    shown = {bar.category for batch in batches for _, bars in batch.rows for bar in bars}
    handles = [Patch(color=color, label=category) for category, color in COLORS.items() if category in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
    return figure


def plain(axes: Any) -> None:
    """Leave out the lines of a frame that say nothing."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
