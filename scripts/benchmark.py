#!/usr/bin/env python3
"""What rebalancing brings: every case under every balancer, side by side in one run, one table.

    deepspeed --num_gpus 8 scripts/benchmark.py                             # emulated layers, any number of stages
    deepspeed --num_gpus 8 scripts/benchmark.py --case pruning --json pruning.json
    deepspeed --num_gpus 2 scripts/benchmark.py --compute real              # the models of ds_configs

Set OMP_NUM_THREADS=1: one thread per stage. Emulated layers sleep as long as their case's load model says, through the
real engine; "oracle" is told where they are even, and pays for nothing. "best static": speedup over the fastest of the
static partitions that can be known before training (uniform, by parameters, balanced by a profile of the model before
it changes); every balancer starts at the one that is predicted to be.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from benchmarks.arms import engines_end_here
from benchmarks.emulated import ALWAYS, emulated_rows
from benchmarks.machine import Stolen, machine
from benchmarks.real import real_rows
from benchmarks.rows import print_rows
from ds_dynmo.errors import ConfigError
from simulation.loads import CASES
from simulation.runs import ARMS
from startup import init_distributed


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all; may be repeated")
    parser.add_argument(
        "--balancer",
        action="append",
        choices=[arm for arm in ARMS if arm not in ALWAYS],
        help="beside the static partitions and the dense model; default: all; may be repeated",
    )
    parser.add_argument("--compute", choices=["emulated", "real"], default="emulated", help="default: %(default)s")
    parser.add_argument("--stages", type=int, help="of the pipeline: the number of processes")
    parser.add_argument("--layers", type=int, default=32, help="of emulated models, default %(default)s")
    parser.add_argument("--micro-batches", type=int, default=12, help="of emulated batches, default %(default)s")
    parser.add_argument("--forward-ms", type=float, help="of a mean emulated layer; default: 5, 12 at interval 1")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each balancer, default %(default)s")
    parser.add_argument("--batches", type=int, default=1, help="of an emulated turn, default %(default)s")
    parser.add_argument("--steps", type=int, default=90, help="of a real run, default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the load models, default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def check(arguments: argparse.Namespace) -> None:
    """Refuse sizes that make no pipeline.

    Raises:
        ConfigError: naming the option, its value and what is allowed.
    """
    world = int(os.environ.get("WORLD_SIZE", 0))
    if not world:
        raise ConfigError("start with DeepSpeed's launcher: deepspeed --num_gpus 8 scripts/benchmark.py ...")
    if arguments.stages not in (None, world):
        raise ConfigError(f"--stages {arguments.stages}: should be the number of processes, {world}")
    if arguments.compute == "emulated" and arguments.layers < world:
        raise ConfigError(f"--layers {arguments.layers}: should be at least the number of stages, {world}")
    for option in ("micro_batches", "rounds", "batches"):
        if getattr(arguments, option) < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {getattr(arguments, option)}: should be at least 1")
    if arguments.steps < arguments.rounds:
        raise ConfigError(f"--steps {arguments.steps}: should be at least the rounds, {arguments.rounds}")


def main(given: list[str]) -> None:
    arguments = parse(given)
    try:
        check(arguments)
    except ConfigError as error:
        raise SystemExit(f"benchmark.py: error: {error}") from error
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    init_distributed()
    measure = emulated_rows if arguments.compute == "emulated" else real_rows
    table, stolen = [], Stolen()
    for name in arguments.case or CASES:
        with engines_end_here():
            rows = measure(CASES[name], arguments)
        table += rows
        if torch.distributed.get_rank() == 0:
            print_rows(rows)
            print(f"The machine's host took {stolen.share():.0%} of its cores so far.", flush=True)
            write(table, arguments, stolen.share())
    torch.distributed.barrier()


def write(table: list[dict[str, object]], arguments: argparse.Namespace, stolen: float) -> None:
    """The rows so far; ``stolen``: by the machine's host."""
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "local_rank")}
        result = {"machine": {**machine(), "stolen": stolen}, "settings": settings, "rows": table}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
