#!/usr/bin/env python3
"""Simulate what rebalancing gains over a run, from the paper's load formulas or from a recorded run.

    python scripts/simulate_runs.py                                     # the paper's settings, beside its figures
    python scripts/simulate_runs.py --case pruning --stages 8 --micro-batches 16
    python scripts/simulate_runs.py --case moe --interval 10 --link-gbps 50
    python scripts/simulate_runs.py --recorded run.jsonl --stages 4     # what ds-dynmo-train --record wrote

Speedups are over the dense model, and over the best static partition of the same dynamic model: uniform, by parameters,
or balanced by the loads of the first iteration. Every balancer starts at that one. "zero bubble" is our schedule, with
the order that is shortest for each iteration; "1F1B" is DeepSpeed's. Links are included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ds_dynmo.cli.command_line import CommandParser, check_at_least_1, print_table, settings_of, write_json
from ds_dynmo.errors import ConfigError, PartitionError, counted
from simulation import CASE_HELP, RECORDED_HELP, Recorded, chosen_load_models
from simulation.runs import ARMS, Setting, compare, figures_of
from simulation.statics import STATIC, STATICS, label


class Published(NamedTuple):
    """The paper's figures of one case, at the largest scale.

    Attributes:
        over: "static": the same dynamic model; "dense": the model that does no less work, or has no exits; "Egeria":
            freezing under a static partition, in Egeria's own implementation.
        bubble_before, bubble_after: in words, as published.
    """

    speedup: str
    over: str
    bubble_before: str
    bubble_after: str = ""


PAPER: Mapping[str, Published] = {
    "moe": Published("1.23", "static", "25%", "8%"),
    "pruning": Published("3.18", "static", "almost 5 x dense"),
    "freezing": Published("2.23", "Egeria", "40%"),
    "sparse_attention": Published("2.71 to 4.02", "dense", "4 x dense"),
    "early_exit": Published("4.52", "dense", "up to 5 x dense"),
    "mod": Published("1.17", "static", "18%", "4%"),
}

SIZES = ("layers", "stages", "replicas", "micro_batches", "interval")


PHASES_HELP = (
    "of a run, or iterations simulated, default %(default)s; recordings at interval 1 are simulated from end to end"
)


COLUMNS = {  # of the table of a case
    "zero bubble: best static": "speedup_over_static",
    "over dense": "speedup_over_dense",
    "bubble": "bubble_ratio",
    "1F1B: best static": "speedup_over_static_1f1b",
    "over dense, 1F1B": "speedup_over_dense_1f1b",
    "bubble, 1F1B": "bubble_ratio_1f1b",
    "zero bubble over 1F1B": "speedup_over_1f1b",
    "imbalance": "imbalance",
}


def print_case(rows: Sequence[dict[str, Any]], setting: Setting) -> None:
    stages, replicas = counted(setting.stages, "stage"), counted(setting.replicas, "replica")
    scale = f"{setting.layers} layers, {stages} x {replicas}"
    print(f"\n{rows[0]['case']}: {scale}, {setting.micro_batches} micro-batches, interval {setting.interval}")
    cells = [[label(row["balancer"]), *(f"{row[key]:.2f}" for key in COLUMNS.values()), row["moves"]] for row in rows]
    print_table(("balancer", *COLUMNS, "moves"), cells)


def print_beside_the_paper(rows: Sequence[dict[str, Any]]) -> None:
    print("\nBeside the paper, whose static is uniform. Under zero bubble; the bubbles are those of the loads alone\n")
    cells = []
    for case, published in PAPER.items():
        own = {row["balancer"]: row for row in rows if row["case"] == case}
        if not own:
            continue
        over_dense = published.over == "dense"
        key = "speedup_over_dense" if over_dense else "speedup_over_uniform"
        dynamic = [row for arm, row in own.items() if arm not in (*STATICS, "dense", "oracle")]
        best = max(dynamic, key=lambda row: float(row[key])) if dynamic else own[STATIC]
        cells.append(
            (
                case,
                published.over,
                published.speedup,
                f"{best[key]:.2f}",
                f"{max(float(row[f'{key}_1f1b']) for row in dynamic or [best]):.2f}",
                "" if over_dense else f"{best['speedup_over_uniform_at_end']:.2f}",
                f"{own['oracle'][key]:.2f}" if "oracle" in own else "",
                f"{best['speedup_over_static']:.2f}",
                f"{best['speedup_over_static_at_end']:.2f}",
                f"{best['speedup_over_1f1b']:.2f}",
                f"{own[STATIC]['bubble_ratio_of_loads']:.0%}",
                published.bubble_before,
                f"{best['bubble_ratio_of_loads']:.0%}",
                published.bubble_after,
            )
        )
    speedups = ("speedup over", "paper", "best", "best, 1F1B", "at end", "oracle")
    others = ("over best static", "at end", "over 1F1B", "bubble before", "paper's", "after", "paper's")
    print_table(("case", *speedups, *others), cells)


def print_cases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    load_models = chosen_load_models(arguments.case, arguments.recorded)
    arms = [arm for arm in ARMS if arm in (*STATICS, "dense", *arguments.balancers)]
    rows = []
    for load_model in load_models:
        sizes = {name: getattr(arguments, name) for name in SIZES}
        setting = Setting.of(load_model, **sizes, link_bytes_per_second=arguments.link_gbps / 8 * 1e9)
        seeds = 1 if isinstance(load_model, Recorded) else arguments.seeds  # they change no recording
        outcomes = compare(load_model, setting, arms, count=arguments.phases, seeds=seeds)
        of_case = [{"case": load_model.name, "balancer": arm, **figures_of(arm, outcomes, setting)} for arm in arms]
        print_case(of_case, setting)
        rows += [{**row, "setting": asdict(setting)} for row in of_case]
    if arguments.recorded is None:
        print_beside_the_paper(rows)
    return rows


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__, prog="simulate_runs.py")
    parser.add_argument("--case", action="append", metavar="NAME", help=CASE_HELP)
    parser.add_argument("--recorded", type=Path, action="append", metavar="FILE_OR_FOLDER", help=RECORDED_HELP)
    parser.add_argument("--layers", type=int, help="default: the paper's for the case")
    parser.add_argument("--stages", type=int, help="default: the paper's, 24 or 16")
    parser.add_argument("--replicas", type=int, help="default: the paper's, 30 or 8")
    parser.add_argument("--micro-batches", type=int, help="of one replica, default: 4 for each stage")
    parser.add_argument("--interval", type=int, help="iterations between rebalances, default: the paper's")
    parser.add_argument("--link-gbps", type=float, default=200, help="between stages, default %(default)s")
    parser.add_argument("--balancers", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    parser.add_argument("--phases", type=int, default=20, help=PHASES_HELP)
    parser.add_argument("--seeds", type=int, default=8, help="runs per figure, default %(default)s")
    arguments = parser.parse_args(given)
    try:
        check_at_least_1(arguments, *SIZES, "phases", "seeds")
        if arguments.link_gbps <= 0:
            raise ConfigError(f"--link-gbps {arguments.link_gbps:g}: should be greater than 0")
        rows = print_cases(arguments)
    except (ConfigError, PartitionError) as error:
        parser.error(str(error))
    write_json(arguments.json, {"arguments": settings_of(arguments), "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
