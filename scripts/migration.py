#!/usr/bin/env python3
"""Measure what moving layers costs, as ratios that are measured side by side in one run of two stages.

    deepspeed --num_gpus 2 scripts/migration.py --precision fp32
    deepspeed --num_gpus 2 scripts/migration.py --precision bf16-zero1 --stage-parameters 50

Four figures: the bandwidth of a move over that of a raw send and receive of the same bytes; the seconds that training
waits for a move while a batch trains, over those of a move between two batches, with that batch over one without a
move, and the share of such a batch that the raw send takes; the seconds of a rebalance that moves nothing over those of
two collectives of a fixed size; and the seconds that a move spends on optimizer state that stays over those of a plain
copy of the same bytes. Set OMP_NUM_THREADS=1.
``--json FILE`` also writes the figures.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.arms import last_report, timed, wait_for_all
from benchmarks.emulation import PRECISIONS, pipeline_engine
from benchmarks.machine import Machine
from ds_dynmo.cli.command_line import (
    CommandParser,
    check_at_least_1,
    num_processes,
    print_table,
    refusals_of,
    write_json,
)
from ds_dynmo.cli.startup import begin_rank
from ds_dynmo.errors import ConfigError

MICRO_BATCHES = 4
MOVED = 4  # layers that move at once
SMALL = 1_000  # parameters of the layer that moves when the cost of those that stay is measured
STAY = 10  # layers of each stage that stay then
LEAST = STAY * SMALL / 1e6  # millions of parameters of those


class Weights(nn.Module):
    """A layer of ``count`` parameters that takes almost no time to compute.

    Attributes:
        seconds: of sleep in each forward pass.
    """

    seconds = 0.0

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(count // 4)) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(Weights.seconds)
        return hidden + sum(weight.sum() for weight in self.weights) * 1e-6  # type: ignore[return-value]


def make_engine(counts: list[int], boundary: int, precision: str) -> Any:
    """Make an engine of two stages over layers of ``counts`` parameters, and train it on one batch."""
    engine = pipeline_engine(
        [LayerSpec(Weights, count) for count in counts],
        micro_batches=MICRO_BATCHES,
        dynmo={"interval": 0, "initial_partition": [0, boundary, len(counts)]},
        gradient_clipping=1.0,
        zero_allow_untested_optimizer=True,
        **PRECISIONS[precision],
    )
    hidden = torch.ones(1, 8, dtype=torch.bfloat16 if precision.startswith("bf16") else torch.float32)
    engine.train_batch(iter(lambda: (hidden, hidden + 1), None))
    return engine


def bandwidth(arguments: argparse.Namespace) -> dict[str, Any]:
    """Move layers to the other stage and back, and send the same bytes raw, in turns."""
    count = int(arguments.layer_parameters * 1e6)
    engine = make_engine([count] * (MOVED + 2), MOVED + 1, arguments.precision)
    moved, raw = [], []
    for _ in range(arguments.pairs):
        for sender, boundary in ((0, 1), (1, MOVED + 1)):
            moved.append(timed(partial(engine.rebalance, [0, boundary, MOVED + 2])))
            size = last_report(engine).bytes_moved
            payload = torch.ones(size, dtype=torch.uint8, device=engine.device) if engine.stage_id == sender else None
            raw.append(timed(partial(send_raw, payload, size, 1 - engine.stage_id)))
    return {
        "bytes": size,
        "move_seconds": statistics.median(moved),
        "raw_seconds": statistics.median(raw),
        "bandwidth_over_raw": statistics.median(b / a for a, b in zip(moved, raw)),
    }


def background(arguments: argparse.Namespace) -> dict[str, Any]:
    """Move layers between two batches, and while a batch of several times that time trains, in turns."""
    count, precision = int(arguments.layer_parameters * 1e6), arguments.precision
    engine = make_engine([count] * (MOVED + 2), MOVED + 1, precision)
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    hidden = torch.ones(1, max(8, int(arguments.activations * 1e6)), dtype=dtype)
    data = iter(lambda: (hidden, hidden + 1), None)
    train = partial(engine.train_batch, data)

    def move(boundary: int, *, background: bool) -> float:
        """Return the seconds of a batch with a move; they exclude a move before it."""
        if not background:
            timed(partial(engine.rebalance, [0, boundary, MOVED + 2]))
        else:
            engine.rebalance([0, boundary, MOVED + 2], background=True)
        return timed(train)

    engine.rebalancer.budget.num_bytes = 1 << 60
    move(1, background=False), move(MOVED + 1, background=False)
    Weights.seconds = 2 * slowest(last_report(engine).migrate_seconds) / MICRO_BATCHES
    between, during, whole, stills = [], [], [], []
    for _ in range(arguments.pairs):
        for boundary, way in ((1, False), (MOVED + 1, True), (1, True), (MOVED + 1, False)):
            still, moving = timed(train), move(boundary, background=way)
            report = last_report(engine)
            stills.append(still)
            if way:
                during.append(slowest(report.migrate_seconds))
                whole.append(moving / still)
            else:
                between.append(slowest(report.migrate_seconds))
    Weights.seconds = 0.0
    wait = statistics.median(between)
    return {
        "wait_between_seconds": wait,
        "wait_during_seconds": statistics.median(during),
        "wait_during_over_between": statistics.median(during) / wait,
        "batch_over_still": statistics.median(whole),
        "batch_seconds": statistics.median(stills),
    }


def slowest(seconds: float) -> float:
    """Return the most seconds of both ranks."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


def send_raw(payload: torch.Tensor | None, size: int, peer: int) -> None:
    """Send one message of ``size`` bytes, or receive it into fresh memory, as layers are."""
    if payload is not None:
        dist.send(payload, peer)
    else:
        dist.recv(torch.empty(size, dtype=torch.uint8, device=get_accelerator().current_device_name()), peer)


def nothing_moves(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time a rebalance to the present partition, and an all-reduce and an all-gather of three numbers."""
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
    """Time the optimizer's part of the move of a small layer, and a copy of the state of layers that stay."""
    count = int(arguments.stage_parameters * 1e6 / STAY)
    engine = make_engine([count] * STAY + [SMALL] + [count] * STAY, STAY, arguments.precision)
    settled, copied = [], []
    install = engine.stage.state.install_parameters

    def clocked(*args: Any) -> None:
        get_accelerator().synchronize()
        began = time.perf_counter()
        install(*args)
        get_accelerator().synchronize()
        settled.append(time.perf_counter() - began)

    engine.stage.state.install_parameters = clocked
    for _ in range(arguments.pairs):
        for boundary in (STAY + 1, STAY):
            engine.rebalance([0, boundary, 2 * STAY + 1])
            copied.append(copy_of_state(engine))
    return {
        "parameters": count * STAY,
        "settle_seconds": statistics.median(settled),
        "copy_seconds": statistics.median(copied),
        "settle_over_copy": statistics.median(a / b for a, b in zip(settled, copied)),
    }


def copy_of_state(engine: Any) -> float:
    """Time a copy of a stage's weights, fp32 weights and moments into fresh memory, one tensor at a time."""
    tensors = [parameter.data for parameter in engine.module.parameters()]
    for group in engine.basic_optimizer.param_groups:
        for parameter in group["params"]:
            tensors += [value for value in engine.basic_optimizer.state[parameter].values() if value.dim()]
            if engine.optimizer is not engine.basic_optimizer:
                tensors.append(parameter.data)
    wait_for_all()
    began = time.perf_counter()
    for tensor in tensors:
        tensor.clone()
    get_accelerator().synchronize()
    return time.perf_counter() - began


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default: %(default)s")
    parser.add_argument("--stage-parameters", type=float, default=10.0, help="millions per stage, default %(default)s")
    parser.add_argument(
        "--layer-parameters",
        type=float,
        default=4.0,
        help=f"millions in each of the {MOVED} layers whose bandwidth is measured, default %(default)s",
    )
    parser.add_argument(
        "--activations",
        type=float,
        default=0.0,
        help="millions of numbers that the stages send each other per micro-batch of a batch with a move; default: few",
    )
    parser.add_argument("--pairs", type=int, default=6, help="pairs of measurements, default %(default)s")
    arguments = parser.parse_args(given)
    with refusals_of("migration.py"):
        check_at_least_1(arguments, "pairs")
        if not 0 <= arguments.activations < math.inf:
            raise ConfigError(f"--activations {arguments.activations}: should be at least 0 (millions)")
        for option, millions in (("stage", arguments.stage_parameters), ("layer", arguments.layer_parameters)):
            if not LEAST <= millions < math.inf:
                raise ConfigError(f"--{option}-parameters {millions}: should be at least {LEAST} (millions)")
        if num_processes("2 scripts/migration.py") != 2:
            raise ConfigError("two ranks are needed: deepspeed --num_gpus 2 scripts/migration.py ...")
    begin_rank()
    machine = Machine()
    figures: dict[str, Any] = {"precision": arguments.precision}
    for measure in (bandwidth, background, nothing_moves, optimizer):
        figures |= measure(arguments)
    figures["raw_over_batch"] = figures["raw_seconds"] / figures["batch_seconds"]
    if dist.get_rank() == 0:
        print_table(("figure", ""), figures.items())
        write_json(arguments.json, {"machine": machine.record(), **figures})


if __name__ == "__main__":
    main(sys.argv[1:])
