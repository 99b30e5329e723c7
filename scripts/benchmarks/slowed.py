#!/usr/bin/env python3
"""A rank that becomes slower in mid-run: throughput before, then without DynMo, with it, and at best.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 8 scripts/benchmarks/slowed.py --rank 3 --factor 2

Layers are alike and sleep; on one rank they begin to take ``factor`` times as long, as on an accelerator that gets too
hot or that others use too. Nobody is told. Engines take turns: a static partition, DynMo with each balancer that
knows of uneven ranks, and the oracle, which is handed the best partition for the true speeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the launcher runs this file by its path

import deepspeed
import torch

from ds_dynmo.partitioners import PipelineModel, shortest, uniform
from scripts.benchmarks.arms import Arm, quietly, say, timed, turns
from scripts.benchmarks.emulation import data, make_engine, set_loads, slow_down
from scripts.simulation.loads import Phase

ARMS = {"static": "static_uniform", "partition": "partition_time", "schedule": "schedule", "oracle": "oracle"}
AFTER = 3  # intervals that each engine trains on after the change, before it is timed


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=1, help="that becomes slow, default %(default)s")
    parser.add_argument("--factor", type=float, default=2.0, help="that its layers take longer, default %(default)s")
    parser.add_argument("--layers", type=int, default=32, help="default %(default)s")
    parser.add_argument("--micro-batches", type=int, default=16, help="per batch, default %(default)s")
    parser.add_argument("--forward-ms", type=float, default=8.0, help="of a layer, default %(default)s")
    parser.add_argument("--interval", type=int, default=4, help="of decisions, default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine, default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


class Slowed:
    """The engines and what is timed on them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.stages = torch.distributed.get_world_size()
        self.batches = data()
        sizes = {"layers": arguments.layers, "micro_batches": arguments.micro_batches, "interval": arguments.interval}
        block = {"profile": {"warmup_batches": 1}}
        self.arms = [
            Arm(
                name,
                quietly(partial(make_engine, arm, **sizes, block=block if name in ("partition", "schedule") else {})),
            )
            for name, arm in ARMS.items()
        ]
        for arm in self.arms:
            set_loads(arm.engine, Phase.of([1.0] * arguments.layers), arguments.forward_ms / 1e3)

    def time_all(self) -> dict[str, list[float]]:
        """Seconds of a batch in each round, by engine. Collective."""
        seconds: dict[str, list[float]] = {arm.name: [] for arm in self.arms}
        for number in range(self.arguments.rounds):
            for arm in turns(self.arms, number):
                seconds[arm.name].append(timed(lambda arm=arm: arm.engine.train_batch(self.batches)))  # type: ignore[misc]
        return seconds

    def settle(self) -> dict[str, int | None]:
        """Some intervals of training; after how many batches each engine first moved."""
        first: dict[str, int | None] = {}
        for arm in self.arms:
            began, before = arm.engine.global_steps, arm.engine.partition
            first[arm.name] = None
            for _ in range(AFTER * self.arguments.interval):
                arm.engine.train_batch(self.batches)
                if first[arm.name] is None and arm.engine.partition != before:
                    first[arm.name] = arm.engine.global_steps - began
        return first

    def best(self) -> list[int]:
        """The partition of the shortest simulated iteration, with the true speeds."""
        forward = [self.arguments.forward_ms / 1e3] * self.arguments.layers
        backward = [2 * seconds for seconds in forward]
        speeds = tuple(1 / self.arguments.factor if rank == self.arguments.rank else 1.0 for rank in range(self.stages))
        pipeline = PipelineModel(tuple(forward), tuple(backward), self.arguments.micro_batches, speeds)
        costs = [f + b for f, b in zip(forward, backward)]
        start = uniform(self.arguments.layers, self.stages)
        return shortest(costs, self.stages, start=start, pipeline=pipeline)

    def measure(self) -> dict[str, object]:
        """Before, then slowed down. Collective."""
        self.settle()
        before = self.time_all()
        say("before: done")
        if torch.distributed.get_rank() == self.arguments.rank:
            slow_down(self.arguments.factor)
        next(arm for arm in self.arms if arm.name == "oracle").engine.rebalance(self.best())
        first = self.settle()
        say("one rank is slow: engines have settled")
        during = self.time_all()
        slow_down(1.0)
        healthy = statistics.median(before["static"])
        return {
            arm.name: {
                "before": statistics.median(healthy / one for one in before[arm.name]),
                "during": statistics.median(healthy / one for one in during[arm.name]),
                "over_static": statistics.median(a / b for a, b in zip(during["static"], during[arm.name])),
                "share_of_ideal": statistics.median(a / b for a, b in zip(during["oracle"], during[arm.name])),
                "moved_after_batches": first[arm.name],
                "partition": arm.engine.partition,
            }
            for arm in self.arms
        }


def main() -> None:
    arguments = parse(sys.argv[1:])
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    found = Slowed(arguments).measure()
    if torch.distributed.get_rank() == 0:
        print(
            "\nthroughput, of the static partition's before; rank", arguments.rank, f"then takes x {arguments.factor:g}"
        )
        print(f"{'':<12}{'before':>9}{'during':>9}{'over static':>13}{'of ideal':>10}{'moved after':>13}  partition")
        for name, row in found.items():
            assert isinstance(row, dict)
            moved = row["moved_after_batches"]
            print(
                f"{name:<12}{row['before']:>9.2f}{row['during']:>9.2f}{row['over_static']:>13.2f}"
                f"{row['share_of_ideal']:>10.2f}{moved if moved is not None else '-':>13}  {row['partition']}"
            )
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
