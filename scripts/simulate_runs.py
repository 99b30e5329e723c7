#!/usr/bin/env python3
"""Simulate what rebalancing and schedules gain over a run, from the paper's load formulas or from a recorded run.

    python scripts/simulate_runs.py                                     # the paper's settings, beside its figures
    python scripts/simulate_runs.py --case pruning --stages 8 --micro-batches 16
    python scripts/simulate_runs.py --case moe --interval 10 --link-gbps 50
    python scripts/simulate_runs.py --recorded run.jsonl --stages 4     # what ds-dynmo-train --record wrote
    python scripts/simulate_runs.py --recorded pieces.jsonl --whole whole.jsonl --stages 8

Speedups are over DeepSpeed's 1F1B: over its default partition, by parameters; over the best static one of three:
uniform, by parameters, or balanced by the loads of the first iteration; over the dense model. Chains start at the best
static partition, a V at its least bottleneck. "zero bubble" is our schedule, "V" the same with two chunks per stage,
where there are two layers per stage. An order is kept until it has become worse by 1%, as by the engine. "halves":
blocks of the paper's models are two layers each. Links are included, and a split costs 5% of a backward pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ds_dynmo.cli.command_line import CommandParser, check_at_least_1, print_table, settings_of, write_json
from ds_dynmo.errors import ConfigError, PartitionError, counted
from simulation import CASE_HELP, RECORDED_HELP, UNDIVIDED_HELP, Recorded, chosen_load_models
from simulation.runs import ARMS, FORMS, HALVES, V_HALVES, Setting, V, compare, figures_of
from simulation.statics import DENSE, STATIC, STATICS, label


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
    "over default": "speedup_over_default",
    "best static": "speedup_over_static",
    "over dense": "speedup_over_dense",
    "bubble": "bubble_ratio",
    "1F1B: over default": "speedup_over_default_1f1b",
    "best static, 1F1B": "speedup_over_static_1f1b",
    "bubble, 1F1B": "bubble_ratio_1f1b",
    "imbalance": "imbalance",
}
WHOLE_HELP = (
    "with --recorded of slices and halves: a recording of the same model in whole layers, whose static partitions and "
    "dense model speedups are over; default: these layers are the sums of their slices and halves"
)
OF_SCHEDULES = {  # of the table of schedules: which figure of which arm
    "makespan, 1F1B": ("makespan", "speedup_over_default_1f1b"),
    "zero bubble": ("makespan", "speedup_over_default"),
    "V": (V, "speedup_over_default"),
    "halves, zero bubble": (HALVES, "speedup_over_default"),
    "halves, V": (V_HALVES, "speedup_over_default"),
    "bound": (STATIC, "speedup_of_bound_over_default"),
}
BESIDE_THE_PAPER = ("makespan", V, HALVES, V_HALVES)


def print_case(rows: Sequence[dict[str, Any]], setting: Setting) -> None:
    stages, replicas = counted(setting.stages, "stage"), counted(setting.replicas, "replica")
    scale = f"{setting.layers} layers, {stages} x {replicas}"
    print(f"\n{rows[0]['case']}: {scale}, {setting.micro_batches} micro-batches, interval {setting.interval}")
    cells = [[label(row["balancer"]), *(figure(row, key) for key in COLUMNS.values()), row["moves"]] for row in rows]
    print_table(("balancer", *COLUMNS, "moves"), cells)


def figure(row: Mapping[str, Any] | None, key: str, form: str = ".2f") -> str:
    """Format a figure of an arm; a dash if it was left out, or has none."""
    return "-" if row is None or row[key] is None else f"{row[key]:{form}}"


def by_case(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Index the rows by case, then by balancer."""
    cases = dict.fromkeys(row["case"] for row in rows)
    return {case: {row["balancer"]: row for row in rows if row["case"] == case} for case in cases}


def print_schedules(rows: Sequence[dict[str, Any]]) -> None:
    print("\nSpeedup over DeepSpeed's default: 1F1B, balanced by parameters before training\n")
    cells = []
    for case, own in by_case(rows).items():
        static = max((own[arm] for arm in STATICS), key=lambda row: float(row["speedup_over_default_1f1b"]))
        shown = (figure(own.get(arm), key) for arm, key in OF_SCHEDULES.values())
        cells.append((case, figure(static, "speedup_over_default_1f1b"), *shown))
    print_table(("case", "best static, 1F1B", *OF_SCHEDULES), cells)


def print_beside_the_paper(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "\nBeside the paper: over its baselines under 1F1B, and bubble ratios; those of loads are without schedules\n"
    )
    cells = []
    for case, own in by_case(rows).items():
        published, before = PAPER[case], own[STATIC]
        key = "speedup_over_dense" if published.over == "dense" else "speedup_over_uniform"
        after = own.get(V_HALVES, own.get("makespan"))
        cells.append(
            (
                case,
                "dense" if published.over == "dense" else "uniform",
                published.speedup + (" (Egeria)" if published.over == "Egeria" else ""),
                *(figure(own.get(arm), key) for arm in BESIDE_THE_PAPER),
                f"{before['bubble_ratio_1f1b']:.0%}",
                *(figure(own.get(arm), "bubble_ratio", ".0%") for arm in BESIDE_THE_PAPER),
                f"{before['bubble_ratio_of_loads']:.0%}",
                published.bubble_before,
                figure(after, "bubble_ratio_of_loads", ".0%"),
                published.bubble_after,
            )
        )
    arms = ("zero bubble", "V", "halves, zero bubble", "halves, V")
    bubbles = ("bubble: uniform, 1F1B", *arms, "of loads: uniform", "paper's", "after", "paper's")
    print_table(("case", "speedup over", "paper", *arms, *bubbles), cells)


def whole_layers_of(path: Path, pieces: Recorded) -> Recorded:
    """Read the recording of the undivided model of ``pieces``.

    Raises:
        ConfigError: it has slices or halves itself, or other layers than these make.
    """
    whole, layers = Recorded.read(path), len(pieces.whole) - 1
    if whole.layers != layers or len(whole.whole) != layers + 1:
        raise ConfigError(
            f"--whole {path}: holds {counted(whole.layers, 'layer')}, {len(whole.whole) - 1} of them whole; should "
            f"hold the {layers} whole layers of {pieces.path}: record it without vocabulary_slices and split_blocks"
        )
    return whole


def print_cases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    load_models = chosen_load_models(arguments.case, arguments.recorded, undivided=arguments.undivided)
    rows = []
    for load_model in load_models:
        sizes = {name: getattr(arguments, name) for name in SIZES}
        setting = Setting.of(load_model, **sizes, link_bytes_per_second=arguments.link_gbps / 8 * 1e9)
        recorded = isinstance(load_model, Recorded)
        asked = [arm for arm in ARMS if arm in (*STATICS, DENSE, *arguments.balancers)]
        asked += [V] if recorded else FORMS  # which layers of a recording are blocks is not known
        seeds = arguments.seeds if load_model.random else 1
        outcomes = compare(load_model, setting, asked, count=arguments.phases, seeds=seeds)
        if arguments.whole and isinstance(load_model, Recorded):
            whole = whole_layers_of(arguments.whole, load_model)
            unit = setting.forward_seconds * whole.unit_us / load_model.unit_us
            own = replace(setting.with_layers(whole.layers), forward_seconds=unit)
            outcomes |= compare(whole, own, [*STATICS, DENSE], count=arguments.phases, seeds=seeds)
        of_case = [{"case": load_model.name, "balancer": arm, **figures_of(arm, outcomes)} for arm in outcomes]
        print_case(of_case, setting)
        rows += [{**row, "setting": asdict(setting)} for row in of_case]
    print_schedules(rows)
    if arguments.recorded is None:
        print_beside_the_paper(rows)
    return rows


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__, prog="simulate_runs.py")
    parser.add_argument("--case", action="append", metavar="NAME", help=CASE_HELP)
    parser.add_argument("--recorded", type=Path, action="append", metavar="FILE_OR_FOLDER", help=RECORDED_HELP)
    parser.add_argument("--undivided", action="store_true", help=UNDIVIDED_HELP)
    parser.add_argument("--whole", type=Path, metavar="FILE", help=WHOLE_HELP)
    parser.add_argument("--layers", type=int, help="default: the paper's for the case")
    parser.add_argument("--stages", type=int, help="default: the paper's, 24 or 16")
    parser.add_argument("--replicas", type=int, help="default: the paper's, 30 or 8")
    parser.add_argument("--micro-batches", type=int, help="of one replica, default: 4 for each stage")
    parser.add_argument("--interval", type=int, help="iterations between rebalances, default: the paper's")
    parser.add_argument("--link-gbps", type=float, default=200, help="between stages, default %(default)s")
    parser.add_argument(
        "--balancers", nargs="+", choices=ARMS, default=["makespan"], help="of chains, default: makespan"
    )
    parser.add_argument("--phases", type=int, default=20, help=PHASES_HELP)
    parser.add_argument("--seeds", type=int, default=1, help="runs per figure, default %(default)s")
    arguments = parser.parse_args(given)
    try:
        check_at_least_1(arguments, *SIZES, "phases", "seeds")
        if arguments.link_gbps <= 0:
            raise ConfigError(f"--link-gbps {arguments.link_gbps:g}: should be greater than 0")
        if arguments.whole and not arguments.recorded:
            raise ConfigError(f"--whole {arguments.whole}: needs --recorded FILE, a recording of slices or halves")
        rows = print_cases(arguments)
    except (ConfigError, PartitionError) as error:
        parser.error(str(error))
    write_json(arguments.json, {"arguments": settings_of(arguments), "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
