"""Measure what measuring and deciding after every batch costs, in turns with engines that never do."""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec

from benchmarks.arms import timed
from benchmarks.emulation import MICRO_BATCH, EmulatedBlock, pipeline_engine

OPTIONS = {"pairs": 12, "micro_batches": 12, "layers": 19, "forward_ms": 12.0}
ENGINES = [(schedule, migration) for schedule in ("1f1b", "zero_bubble") for migration in ("blocking", "background")]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare batches with interval 1 and without decisions, under both schedules, beside a batch and between two."""
    found: dict[str, Any] = {}
    data = iter(lambda: (torch.zeros(MICRO_BATCH), torch.zeros(MICRO_BATCH)), None)
    for schedule, migration in ENGINES:
        engines = {}
        for interval in (0, 1):
            specs = [LayerSpec(EmulatedBlock, arguments.forward_ms / 1e3) for _ in range(arguments.layers)]
            block = {"interval": interval, "min_improvement": 0.99, "migration": migration, "log": False}
            schedules = {"schedule": {"kind": schedule}}
            engines[interval] = pipeline_engine(
                specs, micro_batches=arguments.micro_batches, dynmo={**block, **schedules}
            )
        for engine in engines.values():
            engine.train_batch(data)
            engine.rebalance(engine.partition)  # so that both run the schedule's order
            for _ in range(3):
                engine.train_batch(data)
        ratios = []
        for pair in range(arguments.pairs):
            seconds = {}
            for interval in (0, 1) if pair % 2 == 0 else (1, 0):
                seconds[interval] = timed(partial(train, engines[interval], data))
            ratios.append(seconds[1] / seconds[0])
        name = f"{schedule}, {migration}"
        found[f"{name}: whole cost, median of pairs"] = statistics.median(ratios) - 1
        found[f"{name}: half of the pairs"] = [round(q - 1, 4) for q in statistics.quantiles(ratios, n=4)[::2]]
        reports = engines[1].reports[-arguments.pairs :]
        if reports:
            found[f"{name}: gather ms, decide ms"] = [
                round(1e3 * statistics.median(getattr(report, f"{part}_seconds") for report in reports), 1)
                for part in ("profile", "decide")
            ]
    return found


def train(engine: Any, data: Any) -> None:
    """Train two batches: what the first began may end in the second."""
    for _ in range(2):
        engine.train_batch(data)


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(f"\na decision after every batch, {torch.distributed.get_world_size()} stages")
    for name, value in found.items():
        print(f"  {name}: {value:.4f}" if isinstance(value, float) else f"  {name}: {value}")
