#!/usr/bin/env python3
"""What moving layers costs, as ratios measured side by side in one run of two stages.

    deepspeed --num_gpus 2 scripts/migration.py --precision fp32
    deepspeed --num_gpus 2 scripts/migration.py --precision bf16-zero1 --stage-parameters 50

Three figures: the bandwidth of a move over that of a raw send and receive of the same bytes; a rebalance that
moves nothing over two collectives of a fixed size; the optimizer's part of a move, for the state that stays, over
a plain copy of the same bytes. Set OMP_NUM_THREADS=1. ``--json FILE`` writes the figures too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.arms import timed
from benchmarks.emulation import pipeline_engine
from startup import init_distributed

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "fp32-zero1": {"zero_optimization": {"stage": 1}},
}
SMALL = 1_000  # parameters of the layer that moves when the cost of those that stay is measured


class Weights(nn.Module):
    """``millions`` of parameters that cost next to nothing to compute with."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(count // 4)) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + sum(weight.sum() for weight in self.weights) * 1e-6  # type: ignore[return-value]


def make_engine(counts: list[int], boundary: int, precision: str) -> Any:
    """An engine of two stages over layers of ``counts`` parameters, which has trained one batch."""
    engine = pipeline_engine(
        [LayerSpec(Weights, count) for count in counts],
        micro_batches=2,
        dynmo={"interval": 0, "initial_partition": [0, boundary, len(counts)]},
        gradient_clipping=1.0,
        zero_allow_untested_optimizer=True,
        **PRECISIONS[precision],
    )
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    engine.train_batch(batches(dtype))
    return engine


def batches(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    hidden = torch.ones(1, 8, dtype=dtype)
    while True:
        yield hidden, hidden + 1


def bandwidth(arguments: argparse.Namespace) -> dict[str, Any]:
    """Moves of ``--layers`` layers there and back, against the same bytes sent raw, in turns."""
    count = int(arguments.layer_megabytes * 1e6 / 4)
    layers = arguments.layers
    engine = make_engine([count] * (layers + 2), layers + 1, arguments.precision)
    here, there = [0, layers + 1, layers + 2], [0, 1, layers + 2]
    stage, moved, raw = engine.stage_id, [], []
    for _ in range(arguments.pairs):
        for forth, partition in ((True, there), (False, here)):
            sends = (stage == 0) == forth
            seconds = timed(partial(engine.rebalance, partition))
            size = engine.reports[-1].bytes_moved
            moved.append(seconds)
            payload = torch.ones(size, dtype=torch.uint8) if sends else None
            raw.append(timed(partial(send_raw, payload, size, 1 - stage)))
    ratios = [b / a for a, b in zip(moved, raw)]
    return {
        "bytes": size,
        "move_seconds": statistics.median(moved),
        "raw_seconds": statistics.median(raw),
        "bandwidth_over_raw": statistics.median(ratios),
    }


def send_raw(payload: torch.Tensor | None, size: int, peer: int) -> None:
    """One message of ``size`` bytes, received into memory that is fresh, as a layer's is."""
    if payload is not None:
        dist.send(payload, peer)
    else:
        dist.recv(torch.empty(size, dtype=torch.uint8), peer)


def nothing_moves(arguments: argparse.Namespace) -> dict[str, Any]:
    """A rebalance to the present partition against an all-reduce and an all-gather of three numbers."""
    engine = make_engine([SMALL] * 8, 4, arguments.precision)
    group = dist.new_group(backend="gloo")
    numbers = torch.zeros(3, dtype=torch.int64)

    def collectives() -> None:
        dist.all_reduce(numbers, group=group)
        dist.all_gather([torch.empty_like(numbers) for _ in range(2)], numbers, group=group)

    both = [(timed(lambda: engine.rebalance([0, 4, 8])), timed(collectives)) for _ in range(50 * arguments.pairs)]
    idle, bare = (statistics.median(seconds) for seconds in zip(*both))
    return {"idle_seconds": idle, "collectives_seconds": bare, "idle_over_collectives": idle / bare}


def optimizer(arguments: argparse.Namespace) -> dict[str, Any]:
    """The optimizer's part when a small layer moves, against a copy of the state of those that stay."""
    layers = 10
    count = int(arguments.stage_parameters * 1e6 / layers)
    engine = make_engine([count] * layers + [SMALL] + [count] * layers, layers, arguments.precision)
    settled: list[float] = []
    settle = engine.stage.state.settle

    def clocked(*args: Any) -> None:
        began = time.perf_counter()
        settle(*args)
        settled.append(time.perf_counter() - began)

    engine.stage.state.settle = clocked
    copied = []
    for _ in range(arguments.pairs):
        for boundary in (layers + 1, layers):
            engine.rebalance([0, boundary, 2 * layers + 1])
            copied.append(copy_of_state(engine))
    ratios = [a / b for a, b in zip(settled, copied)]
    return {
        "parameters": count * layers,
        "settle_seconds": statistics.median(settled),
        "copy_seconds": statistics.median(copied),
        "settle_over_copy": statistics.median(ratios),
    }


def copy_of_state(engine: Any) -> float:
    """Seconds to copy a stage's weights, fp32 weights and moments into fresh memory, one tensor at a time."""
    tensors = [parameter.data for parameter in engine.module.parameters()]
    for group in engine.basic_optimizer.param_groups:
        for parameter in group["params"]:
            tensors += [value for value in engine.basic_optimizer.state[parameter].values() if value.dim()]
            if engine.optimizer is not engine.basic_optimizer:
                tensors.append(parameter.data)
    dist.barrier()
    began = time.perf_counter()
    for tensor in tensors:
        tensor.clone()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default: %(default)s")
    parser.add_argument("--layer-megabytes", type=float, default=16.0, help="weights in fp32, default %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="that move at once, default %(default)s")
    parser.add_argument("--stage-parameters", type=float, default=10.0, help="in millions, default %(default)s")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of measurements, default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed()
    if dist.get_world_size() != 2:
        raise SystemExit(f"two ranks are needed, this is {dist.get_world_size()}: deepspeed --num_gpus 2 ...")
    figures: dict[str, Any] = {"precision": arguments.precision, "machine": platform.processor() or platform.machine()}
    for measure in (bandwidth, nothing_moves, optimizer):
        figures |= measure(arguments)
    if dist.get_rank() == 0:
        print(json.dumps(figures, indent=2))
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
