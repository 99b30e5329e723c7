"""The pictures of ds-dynmo-plot, each a matplotlib figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ds_dynmo.cli.plotting.timelines import PASSES, TimelineRows
from ds_dynmo.cli.run_records import RunRecords
from ds_dynmo.partitioners import imbalance_of_loads, loads_of

MOST_TALL_ROWS = 8
MOST_NAMED_STAGES = 16
LEGEND_COLUMNS = 5
WINDOW = 5  # steps of the running median of tokens/s
MILLI = 1e3
STAGES = ("#9ecae9", "#c6dcef")  # in turns
FAINT, STRONG, MOVE, QUIET = "#9ecae9", "#2a6fb0", "#c0392b", "#6a6a6a"
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
    "transfer": "#f4a6a6",
}


def save(figure: Figure, path: Path, kind: str) -> None:
    """Write a figure as ``kind``, "png" or "svg"; an SVG has the same bytes each time, and text as text."""
    metadata = {"Date": None} if kind == "svg" else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_dynmo"}):
        figure.savefig(path, format=kind, dpi=130, metadata=metadata)


def over_time(report: RunRecords) -> Figure:
    """Draw a run: its speed, imbalance and bubble ratio, partition and decisions."""
    ratios, partitions = report.profiles, report.placements()
    heights = [1.0, *([0.8] if ratios else []), *([1.4] if partitions else [])]
    figure = Figure(figsize=(9, 2.6 * sum(heights)), layout="constrained")
    panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    _speed(panels[0], report)
    if ratios:
        _ratios(panels[1], report)
    if partitions:
        _partitions(panels[-1], report)
    _decisions(panels, report)
    for axes in panels:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
        _plain(axes)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
    return figure


def _speed(axes: Any, report: RunRecords) -> None:
    """Draw tokens per second of each step and their running median, or the seconds of profiled batches."""
    if report.steps:
        steps = [record["step"] for record in report.steps]
        tokens, half = [record["tokens_per_second"] for record in report.steps], WINDOW // 2
        smooth = [statistics.median(tokens[max(0, at - half) : at + half + 1]) for at in range(len(tokens))]
        axes.plot(steps, tokens, color=FAINT, linewidth=1, label="each step")
        axes.plot(steps, smooth, color=STRONG, linewidth=2, label=f"median of {WINDOW}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylabel("tokens/s")
    else:
        points = [(profile.step, profile.batch_seconds) for profile in report.profiles]
        axes.plot(*zip(*points), "o-", color=STRONG, markersize=4, label="profiled batches")
        axes.set_ylabel("seconds of a batch")
    axes.set_ylim(bottom=0)


def _ratios(axes: Any, report: RunRecords) -> None:
    steps = [profile.step for profile in report.profiles]
    loads = [loads_of(profile.costs("time"), profile.placement) for profile in report.profiles]
    imbalances = [imbalance_of_loads(of_stages) for of_stages in loads]
    bubbles = [profile.bubble_ratio for profile in report.profiles]
    axes.plot(steps, imbalances, "o-", color=COLORS["receive"], markersize=4, label="imbalance")
    axes.plot(steps, bubbles, "s-", color=COLORS["load"], markersize=4, label="bubble ratio")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("measured ratio")


def _partitions(axes: Any, report: RunRecords) -> None:
    """Draw the layers of each stage, from the bottom up; of a V or a loop each chunk's."""
    placements = report.placements()
    ends = [step for step, _ in placements[1:]] + [max(_last_step(report), placements[-1][0] + 1)]
    for (begin, placement), end in zip(placements, ends):
        for chunk, stage in enumerate(placement.owners):
            layers = placement.chunk(chunk)
            axes.fill_between([begin, end], layers.start, layers.stop, color=STAGES[chunk % 2], linewidth=0)
            if placement.num_chunks < MOST_NAMED_STAGES and end - begin > 0.05 * ends[-1]:
                axes.text(
                    (begin + end) / 2,
                    (layers.start + layers.stop) / 2,
                    str(stage),
                    ha="center",
                    va="center",
                    fontsize=8,
                )
    axes.set_ylim(0, placements[0][1].num_layers)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("layers of stages")


def _last_step(report: RunRecords) -> int:
    last = [int(record["step"]) for record in (*report.steps[-1:], *report.repacks[-1:])]
    last += [profile.step for profile in report.profiles[-1:]] + [decision.step for decision in report.decisions[-1:]]
    return max(last)


def _decisions(panels: Sequence[Any], report: RunRecords) -> None:
    """Mark decisions: a line in all panels where layers moved or ranks left, a tick where layers stayed."""
    records = [*(decision.record for decision in report.decisions), *report.repacks]
    changed = [record["step"] for record in records if record.get("model_changed")]
    lines = [
        ("layers moved", "--", MOVE, [decision.step for decision in report.decisions if decision.moved]),
        ("re-packed", "-", MOVE, [record["step"] for record in report.repacks]),
        ("the model changed", ":", QUIET, changed),
    ]
    for axes in panels:
        for name, style, color, steps in lines:
            for step in steps:
                label = name if axes is panels[-1] and step == steps[0] else None
                axes.axvline(step, color=color, linewidth=1, linestyle=style, alpha=0.7, label=label)
    kept = [decision.step for decision in report.decisions if not decision.moved]
    if kept:
        low = panels[-1].get_xaxis_transform()  # a share of the panel's height
        panels[-1].plot(kept, [0.03] * len(kept), "|", color=QUIET, transform=low, label="layers stayed")


def timelines(batches: Sequence[TimelineRows]) -> Figure:
    """Draw batches below each other on one scale of time; a row for each stage."""
    rows = [len(batch.rows) for batch in batches]
    inches = 0.42 if max(rows) <= MOST_TALL_ROWS else 0.22
    figure = Figure(figsize=(10, sum(inches * count + 0.8 for count in rows) + 1.2), layout="constrained")
    panels = figure.subplots(len(batches), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    longest = MILLI * max(batch.seconds for batch in batches)
    for axes, batch in zip(panels, batches):
        for place, (_, bars) in enumerate(batch.rows):
            for category in COLORS:
                spans = [(MILLI * bar.begin_seconds, MILLI * bar.seconds) for bar in bars if bar.category == category]
                edge = {"edgecolor": "white", "linewidth": 0.4} if category in PASSES.values() else {}
                axes.broken_barh(spans, (place - 0.4, 0.8), facecolor=COLORS[category], **edge)
            for bar in bars:
                if bar.category in PASSES.values() and MILLI * bar.seconds > 0.015 * longest:
                    middle = MILLI * (bar.begin_seconds + bar.seconds / 2)
                    text = str(bar.micro_batch)
                    axes.text(middle, place, text, color="white", ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(batch.rows)), [name for name, _ in batch.rows])
        axes.set_ylim(len(batch.rows) - 0.4, -0.6)
        axes.set_xlim(0, longest)
        axes.set_title(f"{batch.title}, {MILLI * batch.seconds:,.0f} ms", fontsize=10, loc="left")
        _plain(axes)
    panels[-1].set_xlabel("ms since the batch began")
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    shown = {bar.category for batch in batches for _, bars in batch.rows for bar in bars}
    handles = [Patch(color=color, label=category) for category, color in COLORS.items() if category in shown]
    columns = min(LEGEND_COLUMNS, len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    return figure


def _plain(axes: Any) -> None:
    """Leave out the lines of a frame that say nothing."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
