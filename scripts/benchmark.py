#!/usr/bin/env python3
"""Compare balancers on every case, side by side in one run, in one table.

    deepspeed --num_gpus 8 scripts/benchmark.py                             # emulated layers, any number of stages
    deepspeed --num_gpus 8 scripts/benchmark.py --case pruning --json pruning.json
    deepspeed --num_gpus 8 scripts/benchmark.py --balancer makespan --schedule 1f1b --schedule v --schedule auto
    deepspeed --num_gpus 8 scripts/benchmark.py --recorded scripts/recordings   # loads of real training

Set OMP_NUM_THREADS=1: one thread per stage. Emulated layers sleep as long as their case's load model says, or as long
as layers took in a run of scripts/train.py, in the real engine. "oracle" knows true costs; its profiling and moves are
not timed. "best static" is the speedup over the fastest static partition that can be known before training: uniform, by
parameters (DeepSpeed's default), or balanced by a profile of the model before it changes. Every balancer starts at the
one that is predicted to be the fastest; with two chunks per stage, at the one that balances the same profile. "over
simulated" is seconds without rebalances over those of a simulation of the same placements, orders and loads; "over
predicted" over what the engine's decisions predicted from the costs that it measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms import ALWAYS, engines_end_here
from benchmarks.emulated import LAYERS, PHASES, RECORDED_BATCHES, emulated_rows, layers_of
from benchmarks.machine import Machine
from benchmarks.rows import print_rows, print_schedules
from ds_dynmo.cli.command_line import (
    CommandParser,
    check_at_least_1,
    check_layers,
    num_processes,
    refusals_of,
    settings_of,
    write_json,
)
from ds_dynmo.cli.startup import begin_rank
from ds_dynmo.errors import ConfigError
from simulation import CASE_HELP, RECORDED_HELP, UNDIVIDED_HELP, LoadModel, Recorded, chosen_load_models
from simulation.runs import ARMS
from simulation.statics import SHAPES


def parse(given: list[str]) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--case", action="append", metavar="NAME", help=CASE_HELP)
    parser.add_argument(
        "--balancer",
        action="append",
        choices=[arm for arm in ARMS if arm not in ALWAYS],
        help="beside the static partitions and the dense model; default: all; may be repeated",
    )
    parser.add_argument("--recorded", type=Path, action="append", metavar="FILE_OR_FOLDER", help=RECORDED_HELP)
    parser.add_argument("--undivided", action="store_true", help=UNDIVIDED_HELP)
    parser.add_argument("--layers", type=int, help=f"of emulated models; default: {LAYERS}, or the recording's")
    parser.add_argument("--micro-batches", type=int, default=12, help="of emulated batches, default %(default)s")
    parser.add_argument("--forward-ms", type=float, help="of a mean emulated layer; default: 5, 12 at interval 1")
    parser.add_argument(
        "--schedule",
        action="append",
        choices=["1f1b", "zero_bubble", "v", "loop", "auto"],
        help="of engines that rebalance, and of the oracle; others run DeepSpeed's 1F1B; default: 1f1b; may be "
        "repeated: an engine for each",
    )
    parser.add_argument(
        "--phases", type=int, default=PHASES, help="of a run whose loads last, about, default %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of each balancer, default %(default)s")
    parser.add_argument(
        "--batches",
        type=int,
        help=f"of an emulated turn; default: 1, and {RECORDED_BATCHES} where recorded loads change in every iteration",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the load models, default %(default)s")
    return parser.parse_args(given)


def checked_load_models(arguments: argparse.Namespace) -> list[LoadModel]:
    """Read the load models, and refuse sizes that do not make a pipeline, or a measurement.

    Raises:
        ConfigError: naming the option, its value and what is allowed.
    """
    stages = num_processes("8 scripts/benchmark.py")
    check_at_least_1(arguments, "layers", "micro_batches", "phases", "rounds", "batches")
    load_models = chosen_load_models(arguments.case, arguments.recorded, undivided=arguments.undivided)
    in_two = next((schedule for schedule in arguments.schedule or () if schedule in SHAPES), None)
    for load_model in load_models:
        layers = layers_of(load_model, arguments)
        whole = len(load_model.whole_layers(layers)) - 1
        load_model.dense(layers)  # refuses another number than the recording's
        where = f"{load_model.path}: layers" if isinstance(load_model, Recorded) else "--layers"
        check_layers(whole, stages, where)
        if in_two and layers < 2 * stages:
            raise ConfigError(
                f"{where} {layers}: should be at least {2 * stages}, two per stage, for --schedule {in_two}"
            )
    return load_models


def main(given: list[str]) -> None:
    arguments = parse(given)
    with refusals_of("benchmark.py"):
        load_models = checked_load_models(arguments)
    begin_rank()
    table, machine = list[dict[str, Any]](), Machine()

    for load_model in load_models:
        with engines_end_here():
            rows = emulated_rows(load_model, arguments)
        table += rows
        if torch.distributed.get_rank() == 0:
            print_rows(rows)
            print(machine, flush=True)
            figures = {"machine": machine.record(), "settings": settings_of(arguments), "rows": table}
            write_json(arguments.json, figures)  # after each case, because later ones may fail
    print_schedules(table)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
