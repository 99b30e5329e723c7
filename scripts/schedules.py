#!/usr/bin/env python3
"""Pipeline schedules side by side: DeepSpeed's 1F1B and DualPipeV, and ours on a chain, a V and a loop.

    deepspeed --num_gpus 8 scripts/schedules.py --micro-batches 12 --pass-ms 8
    deepspeed --num_gpus 8 scripts/schedules.py --micro-batches 16 --pass-ms 24 --arm dualpipev --arm v
    deepspeed --num_gpus 8 scripts/schedules.py --split realistic          # weights: 0.4 of backward; a split costs 5%
    deepspeed --num_gpus 8 scripts/schedules.py --loads random             # or frozen, weightless
    deepspeed --num_gpus 8 scripts/schedules.py --back-to-back 6 --memory 2 --arm zero_bubble --arm zero_bubble_waiting
    deepspeed --num_gpus 2 scripts/schedules.py --compute real --layers 12 --micro-batches 16 --arm auto --batches 30

Set OMP_NUM_THREADS=1: one thread per stage. Layers sleep; those of "--compute real" are transformer blocks, over which
"auto", "zero_bubble", "v" and "loop" find their orders from a profile. Engines take turns, batch by batch. "of work
bound": of a batch in which all stages work as long and never wait. "simulated": from the seconds that layers are told.
"replayed": the order of passes from the seconds that passes took in further batches. With --back-to-back a turn is
several batches in a row; figures are of one after the first. It fails where an engine trained other weights than
DeepSpeed's 1F1B: with --deterministic also on a device whose kernels may add in any order.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

from benchmarks.arms import engines_end_here
from benchmarks.machine import Machine
from benchmarks.scaling import LOADS, SPLITS
from benchmarks.schedules import ARMS, AUTO, STOCK, measure, show
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


def parse(given: list[str]) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument(
        "--arm",
        action="append",
        choices=[arm for arm in ARMS if arm != STOCK],
        help="beside DeepSpeed's 1F1B; default: all; may be repeated",
    )
    parser.add_argument("--compute", choices=["sleep", "real"], default="sleep", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=32, help="of the model, default %(default)s")
    parser.add_argument("--micro-batches", type=int, default=12, help="per batch, default %(default)s")
    parser.add_argument("--pass-ms", type=float, default=8.0, help="of a layer's forward pass, default %(default)s")
    parser.add_argument("--batches", type=int, default=9, help="timed of each, default %(default)s")
    parser.add_argument("--back-to-back", type=int, default=1, help="batches in a row of each, default %(default)s")
    parser.add_argument("--memory", type=float, default=1.0, help="of our passes, over 1F1B's, default %(default)s")
    parser.add_argument("--split", choices=list(SPLITS), default="even", help="of backward, default %(default)s")
    parser.add_argument("--loads", choices=LOADS, default="equal", help="of the layers, default %(default)s")
    parser.add_argument("--hidden-size", type=int, default=256, help="of real blocks, default %(default)s")
    parser.add_argument("--sequence-length", type=int, default=256, help="of real blocks, default %(default)s")
    parser.add_argument("--deterministic", action="store_true", help="choose kernels that always give the same bits")
    parser.add_argument("--seed", type=int, default=0, help="of random loads, default %(default)s")
    return parser.parse_args(given)


def check(arguments: argparse.Namespace) -> None:
    """Refuse sizes that make no pipeline.

    Raises:
        ConfigError: naming the option, its value and what is allowed.
    """
    stages = num_processes("8 scripts/schedules.py")
    check_layers(arguments.layers, stages)
    check_at_least_1(arguments, "micro_batches", "batches", "back_to_back", "hidden_size", "sequence_length")
    if not arguments.memory >= 1:
        raise ConfigError(f"--memory {arguments.memory:g}: should be at least 1")
    if arguments.compute == "sleep" and AUTO in (arguments.arm or ()):
        raise ConfigError(
            f"--arm {AUTO}: needs --compute real, as sleeping layers have their orders from their seconds"
        )
    if not arguments.pass_ms > 0:
        raise ConfigError(f"--pass-ms {arguments.pass_ms:g}: should be above 0")


def main(given: list[str]) -> None:
    arguments = parse(given)
    with refusals_of("schedules.py"):
        check(arguments)
    if arguments.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    begin_rank()
    machine = Machine()
    with engines_end_here():
        found = measure(arguments)
    if torch.distributed.get_rank() == 0:
        show(found, arguments)
        print(machine, flush=True)
        write_json(arguments.json, {"machine": machine.record(), "settings": settings_of(arguments), **found})
    torch.distributed.barrier()
    if found["differing_weights"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
