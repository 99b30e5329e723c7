"""What an engine itself computes for a micro-batch: processor time over tiny layers, DeepSpeed's engine and ours."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.arms import turns, wait_for_all
from benchmarks.emulation import pipeline_engine
from ds_dynmo.cli.command_line import check_at_least_1, print_table

LAYERS, WIDTH = 4, 8
WARM_UP = 3  # batches
STOCK = "DeepSpeed's"
ARMS: dict[str, dict[str, Any] | None] = {  # their "dynmo" sections
    STOCK: None,
    "1f1b": {},
    "1f1b, the rank's random numbers": {"randomness": {"per_layer": False}},
    "zero_bubble": {"schedule": {"kind": "zero_bubble"}},
    "v": {"schedule": {"kind": "v"}},
}
OPTIONS = {"micro_batches": 16, "pairs": 20}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the processor time of micro-batches over four tiny layers, on all ranks together, in turns.

    The least of all batches: what else the machine does only adds.
    """
    check_at_least_1(arguments, "micro_batches", "pairs")
    engines = {name: make_engine(block, arguments.micro_batches) for name, block in ARMS.items()}
    data = iter(lambda: (torch.ones(1, WIDTH), torch.ones(1, WIDTH)), None)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for number in range(-WARM_UP, arguments.pairs):
        for name in turns(list(ARMS), number):
            spent = batch_seconds(engines[name], data) / arguments.micro_batches
            if number >= 0:
                seconds[name].append(spent)
    return {
        "rows": [
            {
                "engine": name,
                "milliseconds": 1e3 * min(spent),
                "over_stock": min(spent) / min(seconds[STOCK]),
            }
            for name, spent in seconds.items()
        ]
    }


def make_engine(block: dict[str, Any] | None, micro_batches: int) -> Any:
    """Make an engine that never decides; None: DeepSpeed's own."""
    specs = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(LAYERS)]
    dynmo = None if block is None else {"interval": 0, "log": False, "monitor": False, **block}
    return pipeline_engine(specs, micro_batches=micro_batches, dynmo=dynmo)


def batch_seconds(engine: Any, data: Any) -> float:
    """Train a batch. Return the seconds that the processes of all ranks computed. Collective."""
    wait_for_all()
    began = time.process_time()
    engine.train_batch(data)
    spent = torch.tensor(time.process_time() - began, dtype=torch.float64)
    torch.distributed.all_reduce(spent)
    return spent.item()


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    stages = torch.distributed.get_world_size()
    print(f"\n{stages} stages, {LAYERS} layers of width {WIDTH}, {arguments.micro_batches} micro-batches")
    rows = [(row["engine"], f"{row['milliseconds']:.3f}", f"{row['over_stock']:.3f}") for row in found["rows"]]
    print_table(("engine", "processor ms per micro-batch", "over DeepSpeed's"), rows)
