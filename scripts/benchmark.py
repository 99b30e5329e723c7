#!/usr/bin/env python3
"""Compare balancers on every case, side by side in one run, in one table.

    deepspeed --num_gpus 8 scripts/benchmark.py                             # emulated layers, any number of stages
    deepspeed --num_gpus 8 scripts/benchmark.py --case pruning --json pruning.json
    deepspeed --num_gpus 8 scripts/benchmark.py --balancer makespan --schedule 1f1b --schedule zero_bubble
    deepspeed --num_gpus 2 scripts/benchmark.py --compute real              # the models of ds_configs

Set OMP_NUM_THREADS=1: one thread per stage. Emulated layers sleep as long as their case's load model says, in the real
engine. "oracle" knows true costs; its profiling and moves are not timed. "best static" is the speedup over the fastest
static partition that can be known before training: uniform, by parameters, or balanced by a profile of the model before
it changes. Every balancer starts at the one that is predicted to be the fastest.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.arms import ALWAYS, engines_end_here
from benchmarks.emulated import emulated_rows
from benchmarks.machine import Machine
from benchmarks.real import real_rows
from benchmarks.rows import print_rows, print_schedules
from command_line import (
    CommandParser,
    check_at_least_1,
    check_layers,
    num_processes,
    refusals_of,
    settings_of,
    write_json,
)
from ds_dynmo.errors import ConfigError
from simulation.loads import CASES
from simulation.runs import ARMS
from startup import begin_rank


def parse(given: list[str]) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all; may be repeated")
    parser.add_argument(
        "--balancer",
        action="append",
        choices=[arm for arm in ARMS if arm not in ALWAYS],
        help="beside the static partitions and the dense model; default: all; may be repeated",
    )
    parser.add_argument("--compute", choices=["emulated", "real"], default="emulated", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=32, help="of emulated models, default %(default)s")
    parser.add_argument("--micro-batches", type=int, default=12, help="of emulated batches, default %(default)s")
    parser.add_argument("--forward-ms", type=float, help="of a mean emulated layer; default: 5, 12 at interval 1")
    parser.add_argument(
        "--schedule",
        action="append",
        choices=["1f1b", "zero_bubble", "auto"],
        help="of emulated engines that rebalance, and of the oracle; others run DeepSpeed's; default: 1f1b; may be "
        "repeated: an engine for each",
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of each balancer, default %(default)s")
    parser.add_argument("--batches", type=int, default=1, help="of an emulated turn, default %(default)s")
    parser.add_argument("--steps", type=int, default=90, help="of a real run, default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the load models, default %(default)s")
    return parser.parse_args(given)


def check(arguments: argparse.Namespace) -> None:
    """Refuse sizes that do not make a pipeline.

    Raises:
        ConfigError: naming the option, its value and what is allowed.
    """
    stages = num_processes("8 scripts/benchmark.py")
    if arguments.compute == "emulated":
        check_layers(arguments, stages)
    check_at_least_1(arguments, "micro_batches", "rounds", "batches")
    if arguments.steps < arguments.rounds:
        raise ConfigError(f"--steps {arguments.steps}: should be at least the rounds, {arguments.rounds}")


def main(given: list[str]) -> None:
    arguments = parse(given)
    with refusals_of("benchmark.py"):
        check(arguments)
    begin_rank()
    measure = emulated_rows if arguments.compute == "emulated" else real_rows
    table, machine = [], Machine()
    for name in arguments.case or CASES:
        with engines_end_here():
            rows = measure(CASES[name], arguments)
        table += rows
        if torch.distributed.get_rank() == 0:
            print_rows(rows)
            print(machine, flush=True)
            write_json(arguments.json, {"machine": machine.record(), "settings": settings_of(arguments), "rows": table})
    print_schedules(table)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
