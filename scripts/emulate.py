#!/usr/bin/env python3
"""Measure one engine, mostly with layers that sleep: communication, profiles and migration are real.

    deepspeed --num_gpus 2 scripts/emulate.py freezing                     # before and after one rebalance
    deepspeed --num_gpus 2 scripts/emulate.py profile --compute real       # profiled seconds and the layers' own clocks
    deepspeed --num_gpus 2 scripts/emulate.py overhead --compute real      # cost of a profile and a rebalance
    deepspeed --num_gpus 8 scripts/emulate.py every-batch                  # cost of a decision after every batch
    deepspeed --num_gpus 2 scripts/emulate.py processor                    # what an engine computes for a micro-batch
    deepspeed --num_gpus 4 scripts/emulate.py memory                       # measured and predicted peak bytes of stages
    deepspeed --num_gpus 2 scripts/emulate.py allocated                    # what devices allocate, and as predicted

Set OMP_NUM_THREADS=1: one thread per stage. ``--json FILE`` also writes the figures.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks import allocated, engine_cpu, every_batch, held_bytes, one_engine
from benchmarks.machine import Machine
from ds_dynmo.cli.command_line import CommandParser, num_processes, refusals_of, write_json
from ds_dynmo.cli.startup import begin_rank

COMMANDS = {
    "freezing": (one_engine, one_engine.freezing),
    "profile": (one_engine, one_engine.profile),
    "overhead": (one_engine, one_engine.overhead),
    "every-batch": (every_batch, every_batch.measure),
    "processor": (engine_cpu, engine_cpu.measure),
    "memory": (held_bytes, held_bytes.measure),
    "allocated": (allocated, allocated.measure),
}
HELP = {  # of the options in a module's OPTIONS
    "compute": "what the layers do: sleep, or real work",
    "forward_ms": "of an emulated layer",
    "hidden_size": "hidden size of real blocks",
    "layers": "emulated ones",
    "micro_batches": "per batch",
    "pairs": "pairs of measurements in turns",
    "sequence_length": "sequence length of real blocks",
}


CHOICES = {"compute": ("sleep", "real")}


def parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="what", required=True, parser_class=CommandParser)
    for name, (module, measure) in COMMANDS.items():
        command = commands.add_parser(name, description=measure.__doc__)
        for option, default in module.OPTIONS.items():
            command.add_argument(
                f"--{option.replace('_', '-')}",
                type=type(default),
                default=default,
                choices=CHOICES.get(option),
                help=f"{HELP[option]}, default {default}",
            )
    return parser.parse_args(given)


def main(given: list[str]) -> None:
    arguments = parse(given)
    module, measure = COMMANDS[arguments.what]
    with refusals_of(f"emulate.py {arguments.what}"):
        num_processes(f"2 scripts/emulate.py {arguments.what}")
        begin_rank()
        machine = Machine()
        found = measure(arguments)
    if torch.distributed.get_rank() == 0:
        module.show(found, arguments)
        print(machine)
        write_json(arguments.json, {"machine": machine.record(), **found})
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
