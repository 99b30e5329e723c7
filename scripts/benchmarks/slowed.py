"""A rank that becomes slower in mid-run: throughput before, then without DynMo, with it, and at best.

Layers are alike and sleep; on one rank they begin to take ``factor`` times as long, as on an accelerator that gets too
hot or that others use too. Nobody is told. Engines take turns of one interval each, decisions included: a static
partition, DynMo with each balancer, and the oracle, which is handed the best partition for
the true speeds.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.arms import Arm, quietly, say, timed, turns
from benchmarks.emulation import data, make_engine, set_loads, slow_down, told_seconds
from ds_dynmo.partitioners import PipelineModel, makespan, uniform
from simulation.loads import Phase
from simulation.runs import DYNAMIC

ARMS = {
    "static": "static_uniform",
    "partition": "partition_time",
    "diffusion": "diffusion_time",
    "makespan": "makespan",
    "oracle": "oracle",
}
MOST_INTERVALS = 12  # that an engine trains on until it has settled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, default=1, help="that becomes slow, default %(default)s")
    parser.add_argument("--factor", type=float, default=2.0, help="that its layers take longer, default %(default)s")
    parser.add_argument("--layers", type=int, default=32, help="default %(default)s")
    parser.add_argument("--micro-batches", type=int, default=16, help="per batch, default %(default)s")
    parser.add_argument("--forward-ms", type=float, default=8.0, help="of a layer, default %(default)s")
    parser.add_argument("--interval", type=int, default=4, help="of decisions, default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine, default %(default)s")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every engine before and after the rank turns slow."""
    ranks = torch.distributed.get_world_size()
    if not 0 <= arguments.rank < ranks:
        raise SystemExit(f"emulate.py slowed: --rank {arguments.rank}: there are {ranks} ranks")
    return Slowed(arguments).measure()


class Slowed:
    """The engines and what is timed on them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.stages = torch.distributed.get_world_size()
        self.batches = data()
        self.phase = Phase.of([1.0] * arguments.layers)
        sizes = {"layers": arguments.layers, "micro_batches": arguments.micro_batches, "interval": arguments.interval}
        block = {"profile": {"warmup_batches": 1}}
        self.arms = [
            Arm(name, quietly(partial(make_engine, arm, **sizes, block=block if arm in DYNAMIC else {})))
            for name, arm in ARMS.items()
        ]
        for arm in self.arms:
            set_loads(arm.engine, self.phase, arguments.forward_ms / 1e3)

    def train(self, arm: Arm) -> None:
        """One interval, which ends with a decision."""
        for _ in range(self.arguments.interval):
            arm.engine.train_batch(self.batches)

    def time_all(self) -> dict[str, list[float]]:
        """Seconds of an interval in each round, by engine. Collective."""
        seconds: dict[str, list[float]] = {arm.name: [] for arm in self.arms}
        for number in range(self.arguments.rounds):
            for arm in turns(self.arms, number):
                seconds[arm.name].append(timed(partial(self.train, arm)))
        return seconds

    def settle(self) -> dict[str, list[int]]:
        """Trains until two decisions in a row move nothing; after how many batches each engine moved."""
        moved: dict[str, list[int]] = {arm.name: [] for arm in self.arms}
        for arm in self.arms:
            began, quiet = arm.engine.global_steps, 0
            for _ in range(MOST_INTERVALS):
                before = arm.engine.partition
                self.train(arm)
                quiet = quiet + 1 if arm.engine.partition == before else 0
                if not quiet:
                    moved[arm.name].append(arm.engine.global_steps - began)
                if quiet == 2:
                    break
        return moved

    def best(self) -> list[int]:
        """The partition of the shortest simulated iteration, with the true speeds."""
        forward, backward = told_seconds(self.phase, self.arguments.forward_ms / 1e3)
        speeds = tuple(1 / self.arguments.factor if rank == self.arguments.rank else 1.0 for rank in range(self.stages))
        pipeline = PipelineModel(forward, backward, self.arguments.micro_batches, speeds)
        costs = [f + b for f, b in zip(forward, backward)]
        start = uniform(self.arguments.layers, self.stages)
        return makespan(costs, self.stages, start=start, pipeline=pipeline)

    def measure(self) -> dict[str, Any]:
        """Before, then slowed down. Collective."""
        self.settle()
        before = self.time_all()
        say("before: done")
        if torch.distributed.get_rank() == self.arguments.rank:
            slow_down(self.arguments.factor)
        next(arm for arm in self.arms if arm.name == "oracle").engine.rebalance(self.best())
        moved = self.settle()
        say("one rank is slow: engines have settled")
        during = self.time_all()
        healthy = statistics.median(before["static"])
        return {
            arm.name: {
                "before": statistics.median(healthy / one for one in before[arm.name]),
                "during": statistics.median(healthy / one for one in during[arm.name]),
                "over_static": statistics.median(a / b for a, b in zip(during["static"], during[arm.name])),
                "share_of_oracle": statistics.median(a / b for a, b in zip(during["oracle"], during[arm.name])),
                "moved_after_batches": moved[arm.name],
                "partition": arm.engine.partition,
            }
            for arm in self.arms
        }


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    print("\nthroughput, of the static partition's before; rank", arguments.rank, f"then takes x {arguments.factor:g}")
    print(f"{'':<12}{'before':>9}{'during':>9}{'over static':>13}{'of oracle':>11}  moved after batches, to")
    for name, row in found.items():
        moved = ", ".join(map(str, row["moved_after_batches"])) or "-"
        print(
            f"{name:<12}{row['before']:>9.2f}{row['during']:>9.2f}{row['over_static']:>13.2f}"
            f"{row['share_of_oracle']:>11.2f}  {moved}: {row['partition']}"
        )
