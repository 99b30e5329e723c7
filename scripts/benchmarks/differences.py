"""Compare balancers "makespan" and "partition" where they differ: random layer costs, few micro-batches."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np
import torch

from benchmarks.arms import say, timed, turns
from benchmarks.emulation import data, make_engine, random_phase, set_loads, told_seconds
from ds_dynmo.errors import ConfigError
from ds_dynmo.partitioners import PipelineModel, balanced, makespan
from simulation import Phase

MOST_TRIES = 1000  # at costs for which the two differ


OPTIONS = {"draws": 8, "rounds": 3, "layers": 32, "micro_batches": 4, "forward_ms": 8.0, "spread": 0.5, "seed": 0}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time balancers "makespan" and "partition" where they differ: random layer costs, few micro-batches.

    Both partitions of a draw come from the true costs of layers. They take turns on one engine.
    """
    stages = torch.distributed.get_world_size()
    engine = make_engine("oracle", layers=arguments.layers, micro_batches=arguments.micro_batches, interval=0)
    chooser, batches, alike = np.random.default_rng(arguments.seed), data(), 0
    found: list[dict[str, Any]] = []
    while len(found) < arguments.draws and alike < MOST_TRIES:
        phase = random_phase(chooser, arguments.layers, arguments.spread)
        partitions, predicted = both(phase, arguments, stages)
        if partitions[0] == partitions[1]:
            alike += 1
            continue
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(arguments.rounds):
            for which in turns((0, 1), number):
                engine.rebalance(partitions[which])
                set_loads(engine, phase, arguments.forward_ms / 1e3)
                engine.train_batch(batches)  # warm up: new shapes, new memory
                seconds[which].append(timed(lambda: engine.train_batch(batches)))
        measured = statistics.median(slow / fast for slow, fast in zip(*seconds))
        found.append({"predicted": predicted, "measured": measured, "partitions": partitions})
        say(f"draw {len(found)} of {arguments.draws}: predicted {predicted:.3f}, measured {measured:.3f}")
    if not found:
        raise ConfigError(f"--seed {arguments.seed}: both balancers agree in all {alike} draws")
    return {"stages": stages, "alike": alike, "draws": found}


def both(phase: Phase, arguments: argparse.Namespace, stages: int) -> tuple[list[list[int]], float]:
    """Return the partitions of "partition" and "makespan", and the predicted ratio of iterations per second."""
    forward, backward = told_seconds(phase, arguments.forward_ms / 1e3)
    pipeline = PipelineModel(forward, backward, arguments.micro_batches, (1.0,) * stages)
    costs = [f + b for f, b in zip(forward, backward)]
    least = balanced(costs, stages)
    partitions = [least, makespan(costs, stages, start=least, pipeline=pipeline)]
    seconds = [pipeline.iteration_seconds(tuple(partition)) for partition in partitions]
    return partitions, seconds[0] / seconds[1]


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    draws = found["draws"]
    print(
        f"\n{found['stages']} stages, {arguments.layers} layers, {arguments.micro_batches} micro-batches: "
        f"the balancers differ in {len(draws)} of {len(draws) + found['alike']} draws.\n"
        "Iterations per second of makespan over partition:"
    )
    for name in ("predicted", "measured"):
        ratios = [draw[name] for draw in draws]
        print(f"{name:<10} median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
