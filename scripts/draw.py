#!/usr/bin/env python3
"""Draw the rows of a benchmark by case, or pipeline schedules beside each other.

    python scripts/draw.py rows rows.json cases.svg             # --json of benchmark.py or simulate.py wrote rows.json
    python scripts/draw.py schedules 8 12 schedules.svg         # stages and micro-batches

Needs matplotlib: the extra "plots".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ds_dynmo.cli.command_line import refusals_of
from ds_dynmo.cli.plotting.data import Record, TimelineRows, rows_of
from ds_dynmo.cli.plotting.pictures import BEFORE, COLORS, MEASURED, MOVE, PREDICTED, plain, svg, timelines
from ds_dynmo.errors import ConfigError
from ds_dynmo.files import write_text
from ds_dynmo.schedules import PassCosts, Schedule, one_f_one_b, replay, schedule_for_equal_costs

BEST_STATIC = "best_static"
SCHEDULES = {"1f1b": "1F1B", "zero_bubble": "zero bubble"}
ARM_COLORS = {
    "uniform, 1F1B": BEFORE,
    "partition, 1F1B": PREDICTED,
    "diffusion, 1F1B": "#a3c76d",
    "makespan, 1F1B": MEASURED,
    "oracle, 1F1B": "#e8a838",
    "best static, zero bubble": COLORS["weight gradient"],
    "makespan, zero bubble": COLORS["input gradient"],
}


def read_rows(path: Path) -> list[Record]:
    """Read the rows that scripts/benchmark.py or ds-dynmo-simulate wrote, one per case, balancer and schedule.

    "speedup_over_static" is over the best static partition under DeepSpeed's 1F1B.

    Raises:
        ConfigError: no such file, or no rows in it.
    """
    try:
        content = json.loads(path.read_text())
        rows: list[Record] = content["rows"] if isinstance(content, dict) else content
        cases = dict.fromkeys(row["case"] for row in rows)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: has no rows of a benchmark: {error!r}") from error
    if not cases:
        raise ConfigError(f"{path}: has no rows of a benchmark")
    if "tokens_per_second_1f1b" in rows[0]:
        return [row for case in cases for row in _by_schedule([row for row in rows if row["case"] == case])]
    return rows


def _by_schedule(of_case: Sequence[Record]) -> Iterator[Record]:
    """Split the rows of a simulated case, which hold two schedules each, and add the best static partition's."""
    keys = {"1f1b": "tokens_per_second_1f1b", "zero_bubble": "tokens_per_second"}
    statics = [row for row in of_case if row["balancer"].startswith("static_")]
    best = {schedule: max(row[key] for row in statics) for schedule, key in keys.items()}
    for schedule, key in keys.items():
        tokens = {row["balancer"]: row[key] for row in of_case} | {BEST_STATIC: best[schedule]}
        for balancer, per_second in tokens.items():
            same = {"case": of_case[0]["case"], "balancer": balancer, "schedule": schedule}
            yield {**same, "speedup_over_static": per_second / best["1f1b"]}


def cases(rows: Sequence[Record]) -> Figure:
    """Draw the throughput of each case, balancer and schedule over the best static partition, and its spread."""
    names = list(dict.fromkeys(row["case"] for row in rows))
    arms = [arm for arm in ARM_COLORS if any(_arm(row) == arm for row in rows)]
    figure = Figure(figsize=(2.6 + (0.3 + 0.28 * len(arms)) * len(names), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        by_case = {row["case"]: row for row in rows if _arm(row) == arm}
        shown = [place for place, name in enumerate(names) if name in by_case]
        heights = [by_case[names[place]]["speedup_over_static"] for place in shown]
        bars = axes.bar(
            [place + (number - (len(arms) - 1) / 2) * width for place in shown],
            heights,
            width,
            color=ARM_COLORS[arm],
            label=arm,
            yerr=_spreads([by_case[names[place]] for place in shown]),
            error_kw={"linewidth": 1, "capsize": 2},
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2, bbox={"facecolor": "white", "linewidth": 0, "pad": 0.5})
    axes.axhline(1, color=MOVE, linewidth=1, linestyle="--", alpha=0.7, zorder=0)
    axes.set_xticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set_ylabel("throughput over the best static\npartition under DeepSpeed's 1F1B")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    plain(axes)
    return figure


def _arm(row: Record) -> str:
    """Name an arm and its schedule; those by parameters keep their names and are not drawn."""
    name = "uniform" if row["balancer"] == "static_uniform" else str(row["balancer"]).removesuffix("_time")
    return f"{name.replace('_', ' ')}, {SCHEDULES[row.get('schedule', '1f1b')]}"


def _spreads(rows: Sequence[Record]) -> list[list[float]] | None:
    """Return how far the slowest and fastest rounds are below and above each bar; None if rows lack them."""
    if not all("tokens_per_second_spread" in row for row in rows):
        return None
    of_bars = []
    for row in rows:
        least, most = row["tokens_per_second_spread"]
        unit = row["speedup_over_static"] / row["tokens_per_second"]
        of_bars.append((unit * (row["tokens_per_second"] - least), unit * (most - row["tokens_per_second"])))
    return [list(ends) for ends in zip(*of_bars)]


def scheduled(schedule: Schedule, title: str) -> TimelineRows:
    """Make the timeline of a schedule where a forward pass and both parts of a backward pass take a second each."""
    return rows_of(replay(schedule, PassCosts.equal(schedule.owners)), title)


def schedules(stages: int, micro_batches: int) -> Figure:
    """Draw 1F1B and the zero-bubble schedule for equal costs.

    Raises:
        ConfigError: there is no such pipeline.
    """
    if min(stages, micro_batches) < 1:
        raise ConfigError(f"schedules {stages} {micro_batches}: should be at least 1 each")
    orders = [
        scheduled(one_f_one_b(stages, micro_batches), "1F1B"),
        scheduled(schedule_for_equal_costs(stages, micro_batches), "zero bubble"),
    ]
    return timelines(orders, in_passes=True)


def main(given: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    rows = kinds.add_parser("rows", help="the rows of a benchmark")
    rows.add_argument("rows", type=Path, help="the JSON that it wrote")
    orders = kinds.add_parser("schedules", help="1F1B beside zero bubble, where all passes take the same")
    orders.add_argument("stages", type=int)
    orders.add_argument("micro_batches", type=int)
    for kind in (rows, orders):
        kind.add_argument("picture", type=Path, help="SVG file to write")
    arguments = parser.parse_args(given)
    with refusals_of("draw.py"):
        if arguments.kind == "rows":
            figure = cases(read_rows(arguments.rows))
        else:
            figure = schedules(arguments.stages, arguments.micro_batches)
        write_text(arguments.picture, svg(figure).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
