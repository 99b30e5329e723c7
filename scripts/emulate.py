#!/usr/bin/env python3
"""Questions about one engine, most of them with layers that sleep: communication, profile and migration are real.

    deepspeed --num_gpus 2 scripts/emulate.py freezing                     # one change: before and after the rebalance
    deepspeed --num_gpus 2 scripts/emulate.py profile --compute real       # profiled seconds beside layers' own clocks
    deepspeed --num_gpus 2 scripts/emulate.py overhead --compute real      # what a profile and a rebalance cost
    deepspeed --num_gpus 8 scripts/emulate.py prediction                   # simulated iterations beside measured ones
    deepspeed --num_gpus 8 scripts/emulate.py makespan                     # that balancer beside "partition"
    deepspeed --num_gpus 8 scripts/emulate.py slowed --rank 3 --factor 2   # a rank that turns slow in mid-run

Set OMP_NUM_THREADS=1: one thread per stage. ``--json FILE`` writes the figures too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from benchmarks import differences, one_engine, prediction, slowed
from benchmarks.machine import Stolen, machine
from startup import init_distributed

COMMANDS = {
    "freezing": (one_engine, one_engine.freezing),
    "profile": (one_engine, one_engine.profile),
    "overhead": (one_engine, one_engine.overhead),
    "prediction": (prediction, prediction.measure),
    "makespan": (differences, differences.measure),
    "slowed": (slowed, slowed.measure),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="what", required=True)
    for name, (module, measure) in COMMANDS.items():
        about = module.__doc__ if measure.__name__ == "measure" else measure.__doc__
        command = commands.add_parser(name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(command)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args(arguments)


def main(given: list[str]) -> None:
    arguments = parse(given)
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit(f"start with DeepSpeed's launcher: deepspeed --num_gpus 2 scripts/emulate.py {arguments.what}")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    init_distributed()
    module, measure = COMMANDS[arguments.what]
    stolen = Stolen()
    found = measure(arguments)
    if torch.distributed.get_rank() == 0:
        module.show(found, arguments)
        print(f"The machine's host took {stolen.share():.0%} of its cores.")
        if arguments.json:
            arguments.json.write_text(json.dumps({"machine": machine(), **found}, indent=2) + "\n")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
