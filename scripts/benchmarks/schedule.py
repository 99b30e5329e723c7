#!/usr/bin/env python3
"""Balancer "makespan" against "partition", measured where they differ: random layer costs, few micro-batches.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 8 scripts/benchmarks/schedule.py --micro-batches 4

Layers sleep, forward and backward shares are drawn apart. Both partitions come from the costs that layers are told;
they take turns on one engine. Draws in which both are the same are left out and counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the launcher runs this file by its path

import numpy as np
import torch

from ds_dynmo.partitioners import PipelineModel, balanced, makespan
from scripts.benchmarks.arms import quietly, say, timed
from scripts.benchmarks.emulation import data, make_engine, random_phase, set_loads, told_seconds
from scripts.simulation.loads import Phase
from scripts.startup import init_distributed

MOST_TRIES = 1000  # at costs for which the two differ


@dataclass(frozen=True)
class Difference:
    """One draw of costs: what "makespan" brings over "partition", as a ratio of iterations per second."""

    predicted: float
    measured: float
    partitions: tuple[list[int], list[int]]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=8, help="in which the two differ, default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each partition, default %(default)s")
    parser.add_argument("--layers", type=int, default=32, help="default %(default)s")
    parser.add_argument("--micro-batches", type=int, default=4, help="per batch, default %(default)s")
    parser.add_argument("--forward-ms", type=float, default=8.0, help="of a layer, the median, default %(default)s")
    parser.add_argument("--spread", type=float, default=0.5, help="of costs, of their logarithm, default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the costs, default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the draws here too")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def both(phase: Phase, arguments: argparse.Namespace, stages: int) -> tuple[list[list[int]], float]:
    """The partitions of "partition" and "makespan", and the predicted ratio."""
    forward, backward = told_seconds(phase, arguments.forward_ms / 1e3)
    pipeline = PipelineModel(forward, backward, arguments.micro_batches, (1.0,) * stages)
    costs = [f + b for f, b in zip(forward, backward)]
    least = balanced(costs, stages)
    partitions = [least, makespan(costs, stages, start=least, pipeline=pipeline)]
    seconds = [pipeline.iteration_seconds(tuple(partition)) for partition in partitions]
    return partitions, seconds[0] / seconds[1]


def measure(arguments: argparse.Namespace) -> tuple[list[Difference], int]:
    """Every draw, and how many there were that brought no difference. Collective."""
    stages = torch.distributed.get_world_size()
    sizes = {"layers": arguments.layers, "micro_batches": arguments.micro_batches, "interval": 0}
    engine = quietly(partial(make_engine, "oracle", **sizes))
    chooser, batches, alike = np.random.default_rng(arguments.seed), data(), 0
    found: list[Difference] = []
    while len(found) < arguments.draws and alike < MOST_TRIES:
        phase = random_phase(chooser, arguments.layers, arguments.spread)
        partitions, predicted = both(phase, arguments, stages)
        if partitions[0] == partitions[1]:
            alike += 1
            continue
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(arguments.rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                engine.rebalance(partitions[which])
                set_loads(engine, phase, arguments.forward_ms / 1e3)
                engine.train_batch(batches)  # warm up: new shapes, new memory
                seconds[which].append(timed(lambda: engine.train_batch(batches)))
        measured = statistics.median(slow / fast for slow, fast in zip(*seconds))
        found.append(Difference(predicted, measured, (partitions[0], partitions[1])))
        say(f"draw {len(found)} of {arguments.draws}: predicted {predicted:.3f}, measured {measured:.3f}")
    return found, alike


def main() -> None:
    arguments = parse(sys.argv[1:])
    torch.set_num_threads(1)
    init_distributed()
    found, alike = measure(arguments)
    if not found:
        raise SystemExit(f"schedule.py: both balancers agree in all {alike} draws")
    if torch.distributed.get_rank() == 0:
        stages = torch.distributed.get_world_size()
        print(f"\n{stages} stages, {arguments.layers} layers, {arguments.micro_batches} micro-batches: the balancers")
        print(
            f"differ in {len(found)} of {len(found) + alike} draws. Iterations per second of schedule over partition:"
        )
        for name in ("predicted", "measured"):
            ratios = [getattr(one, name) for one in found]
            print(f"{name:<10} median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n")
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
