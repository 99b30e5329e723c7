"""Measure throughput when a rank becomes slow during a run: before, then without DynMo, with it, and at best."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.arms import Arm, say, timed, turns
from benchmarks.emulation import data, make_engine, set_loads, slow_down, told_seconds
from ds_dynmo.cli.command_line import print_table
from ds_dynmo.errors import ConfigError
from ds_dynmo.partitioners import PipelineModel, makespan, uniform
from simulation import Phase
from simulation.runs import DYNAMIC

OPTIONS = {"rank": 1, "factor": 2.0, "layers": 32, "micro_batches": 16, "forward_ms": 8.0, "interval": 4, "rounds": 5}
ARMS = {
    "static": "static_uniform",
    "partition": "partition_time",
    "diffusion": "diffusion_time",
    "makespan": "makespan",
    "oracle": "oracle",
}
MOST_INTERVALS = 12  # that an engine trains on until it has settled


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time engines before and after layers on one rank begin to take ``--factor`` times as long, unannounced.

    Engines take turns of one interval each, decisions included: a static partition, DynMo with each balancer, and the
    oracle, which gets the best partition for the true speeds. Layers are equal and sleep.
    """
    ranks = torch.distributed.get_world_size()
    if not 0 <= arguments.rank < ranks:
        raise ConfigError(f"--rank {arguments.rank}: there are {ranks} ranks")
    phase = Phase.of([1.0] * arguments.layers)
    sizes = {"layers": arguments.layers, "micro_batches": arguments.micro_batches, "interval": arguments.interval}
    arms = []
    for name, arm in ARMS.items():
        block = {"profile": {"warmup_batches": 1}} if arm in DYNAMIC else {}
        arms.append(Arm(name, make_engine(arm, **sizes, block=block)))
        set_loads(arms[-1].engine, phase, arguments.forward_ms / 1e3)
    settle(arms, arguments.interval)
    before = time_all(arms, arguments)
    say("before: done")
    if torch.distributed.get_rank() == arguments.rank:
        slow_down(arguments.factor)
    oracle = next(arm for arm in arms if arm.name == "oracle")
    oracle.engine.rebalance(best_partition(phase, arguments))
    moved = settle(arms, arguments.interval)
    say("one rank is slow: engines have settled")
    during = time_all(arms, arguments)
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
        for arm in arms
    }


def train(arm: Arm, interval: int) -> None:
    """Train one interval, which ends with a decision."""
    for _ in range(interval):
        arm.engine.train_batch(data())


def time_all(arms: Sequence[Arm], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Time one interval of each engine in each round. Collective."""
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number in range(arguments.rounds):
        for arm in turns(arms, number):
            seconds[arm.name].append(timed(partial(train, arm, arguments.interval)))
    return seconds


def settle(arms: Sequence[Arm], interval: int) -> dict[str, list[int]]:
    """Train until two decisions in a row move nothing. Return after how many batches each engine moved."""
    moved: dict[str, list[int]] = {arm.name: [] for arm in arms}
    for arm in arms:
        began, quiet = arm.engine.global_steps, 0
        for _ in range(MOST_INTERVALS):
            before = arm.engine.partition
            train(arm, interval)
            quiet = quiet + 1 if arm.engine.partition == before else 0
            if not quiet:
                moved[arm.name].append(arm.engine.global_steps - began)
            if quiet == 2:
                break
    return moved


def best_partition(phase: Phase, arguments: argparse.Namespace) -> list[int]:
    """Find the partition of the shortest simulated iteration, with the true speeds."""
    ranks = torch.distributed.get_world_size()
    forward, backward = told_seconds(phase, arguments.forward_ms / 1e3)
    speeds = tuple(1 / arguments.factor if rank == arguments.rank else 1.0 for rank in range(ranks))
    pipeline = PipelineModel(forward, backward, arguments.micro_batches, speeds)
    costs = [f + b for f, b in zip(forward, backward)]
    return makespan(costs, ranks, start=uniform(arguments.layers, ranks), pipeline=pipeline)


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(f"\nthroughput, of the static partition's before; rank {arguments.rank} then takes x {arguments.factor:g}")
    shares = ("before", "during", "over_static", "share_of_oracle")
    cells = [
        (name, *(f"{row[key]:.2f}" for key in shares), row["moved_after_batches"], row["partition"])
        for name, row in found.items()
    ]
    print_table(("engine", "before", "during", "over static", "of oracle", "moved after batches", "to"), cells)
