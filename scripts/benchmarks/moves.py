"""Measure batches during which layers move, each of them, beside batches without a move and batches after one."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.arms import timed
from benchmarks.emulation import pipeline_engine
from ds_dynmo.cli.command_line import print_table

OPTIONS = {"rounds": 6, "micro_batches": 16, "forward_ms": 10.0, "parameters": 1.0}


class Sleeping(nn.Module):
    """A layer of ``count`` parameters whose forward pass sleeps for ``seconds``; all else takes almost no time."""

    def __init__(self, count: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))
        self.seconds = seconds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return hidden + self.weight.sum() * 1e-6


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time batches in turns: without a move, with a move while they train, and after a move for which training waits.

    The first three by an engine that never decides. "deciding" is another engine, which profiles every batch, decides
    after it (there is nothing to gain, so layers stay), and has the same moves while batches train.

    Every stage has a layer that takes all the time, and hands one that takes none to its neighbour and back in every
    batch. So all placements are equally fast, and what is measured is the move alone.
    """
    ranks = torch.distributed.get_world_size()
    count = int(arguments.parameters * 1e6)
    pair = [LayerSpec(Sleeping, 1000, arguments.forward_ms / 1e3), LayerSpec(Sleeping, count, 0.0)]
    never, always = (
        pipeline_engine(pair * ranks, micro_batches=arguments.micro_batches, dynmo={"interval": interval})
        for interval in (0, 1)
    )
    hidden = torch.ones(1, 8)
    data = iter(lambda: (hidden, hidden + 1), None)
    away = [0, *(2 * stage - 1 for stage in range(1, ranks)), 2 * ranks]

    def moving(engine: Any, background: bool) -> Callable[[], None]:
        engine.rebalancer.budget.num_bytes = 1 << 60
        places = [away, engine.partition]  # gone to in turns

        def run() -> None:
            places.reverse()
            engine.rebalance(places[0], background=background)
            engine.train_batch(data)
            assert engine.partition == places[0], "a decision has moved layers: there was something to gain"

        return run

    arms: dict[str, Callable[[], object]] = {
        "still": partial(never.train_batch, data),
        "background": moving(never, True),
        "blocking": moving(never, False),
        "deciding": moving(always, True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for run in arms.values():
        run()
        run()
    for _ in range(arguments.rounds):
        for name, run in arms.items():
            seconds[name] += [timed(run), timed(run)]
    moved = never.reports[-1]
    return {
        "bytes": moved.bytes_moved,
        "batch_seconds": statistics.median(seconds["still"]),
        **{
            f"{name}_over_still": statistics.median(a / b for a, b in zip(seconds[name], seconds["still"]))
            for name in arms
            if name != "still"
        },
    }


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the figures."""
    print_table(("figure", ""), found.items())
