#!/usr/bin/env python3
"""Measure what the control plane costs a rank, by the number of ranks: seconds, CPU milliseconds and sockets.

    python scripts/control_plane.py --stages 8
    python scripts/control_plane.py --stages 8 --replicas 8 --json FILE

Ranks are processes of this machine, forked from one that has imported what an engine imports, with layers that cost
nothing. With fewer cores than ranks the seconds are those of all ranks on these cores; the CPU milliseconds, means over
ranks, are those of a rank anywhere.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn

from benchmarks.emulation import pipeline_engine
from ds_dynmo.cli.command_line import CommandParser, check_at_least_1, print_table, refusals_of, write_json

LAYERS_PER_STAGE = 2
COLUMNS = 24  # of a profile's table


class Tiny(nn.Module):
    """A layer that costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight


def cost(call: Callable[[], Any], repeats: int = 1) -> dict[str, float]:
    """Call on every rank; return the median seconds on the slowest rank, and the mean CPU milliseconds of a rank."""
    seconds, cpu_ms = [], []
    for _ in range(repeats):
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        call()
        seconds.append(time.perf_counter() - began)
        cpu_ms.append(1000 * (time.process_time() - cpu))
    slowest, mean = torch.tensor(seconds), torch.tensor(cpu_ms)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    return {
        "seconds": statistics.median(slowest.tolist()),
        "cpu_ms": statistics.median(mean.tolist()) / dist.get_world_size(),
    }


def sockets() -> int:
    """Count the sockets of this process."""
    folder, found = "/proc/self/fd", 0
    for name in os.listdir(folder):
        try:
            found += os.readlink(f"{folder}/{name}").startswith("socket:")
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


def measure(stages: int, replicas: int, repeats: int, folder: str) -> dict[str, Any]:
    """Measure on one rank; return the figures."""
    topology = PipeDataParallelTopology(num_pp=stages, num_dp=replicas)
    specs = [LayerSpec(Tiny) for _ in range(LAYERS_PER_STAGE * stages)]
    hidden = torch.ones(1, 4)
    data = iter(lambda: (hidden, hidden), None)
    engines: list[Any] = []

    def build(dynmo: dict[str, Any] | None) -> None:
        engines.append(pipeline_engine(specs, micro_batches=stages, dynmo=dynmo, topology=topology))

    ours = {"interval": 0, "log": False, "timeout_seconds": 300}
    before = sockets()
    figures: dict[str, Any] = {"initialize, DeepSpeed": cost(partial(build, None))}
    between = sockets()
    figures["initialize"] = cost(partial(build, ours))
    stock, engine = engines[-2:]
    for one in (stock, engine):
        one.train_batch(data)
    engine.rebalance()
    comm = engine.stage.comm
    table = torch.zeros(LAYERS_PER_STAGE * stages + 1, COLUMNS, dtype=torch.float64)
    figures["nothing"] = cost(lambda: None, repeats)  # what is left of the barrier before it
    figures["all_reduce of 4 numbers, DeepSpeed's group"] = cost(lambda: dist.all_reduce(torch.zeros(4)), repeats)
    figures["agreement"] = cost(lambda: comm.everywhere("a measurement", int, same=str), repeats)
    figures["reduction of a profile"] = cost(lambda: comm.read_max(comm.post_max(table)), repeats)
    figures["rebalance that moves nothing"] = cost(engine.rebalance, repeats)
    figures["save, DeepSpeed"] = cost(lambda: stock.save_checkpoint(f"{folder}/stock"))
    figures["save"] = cost(lambda: engine.save_checkpoint(f"{folder}/ours"))
    counts = torch.tensor([sockets() - between, between - before, sockets()])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    figures["sockets"] = dict(zip(("ours, with an engine's own", "an engine's own", "all"), counts.tolist()))
    if stages > 1:
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        engine.repack(stages // 2)
        figures["re-pack to half"] = {
            "seconds": time.perf_counter() - began,
            "cpu_ms": 1000 * (time.process_time() - cpu),
        }
    return figures


def run_rank(rank: int, world_size: int, port: int, results: Any, arguments: tuple[Any, ...]) -> None:
    """Run one rank; rank 0 passes its figures on, and the names of all modules that it has imported."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    figures = measure(*arguments)
    if rank == 0:
        results.put((figures, list(sys.modules)))


def run(stages: int, replicas: int, repeats: int) -> tuple[dict[str, Any], list[str]]:
    """Fork the ranks, and return the figures, and what rank 0 has imported.

    Raises:
        RuntimeError: a rank failed.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results, world_size = context.SimpleQueue(), stages * replicas
    with tempfile.TemporaryDirectory() as folder:
        arguments = (stages, replicas, repeats, folder)
        ranks = [
            context.Process(target=run_rank, args=(rank, world_size, port, results, arguments))
            for rank in range(world_size)
        ]
        gc.freeze()  # a collection in a rank would copy what it shares with this process
        for process in ranks:
            process.start()
        while results.empty() and not any(process.exitcode for process in ranks):
            time.sleep(0.1)
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
        found: tuple[dict[str, Any], list[str]] = ({}, []) if failed else results.get()
        for process in ranks:
            process.kill()
            process.join()
    if failed:
        raise RuntimeError(f"ranks {failed} failed")
    return found


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--stages", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=9, help="of which the median counts, default: %(default)s")
    arguments = parser.parse_args(given)
    with refusals_of("control_plane.py"):
        check_at_least_1(arguments, "stages", "replicas", "repeats")
    _, modules = run(1, 1, 1)
    for name in modules:
        with suppress(Exception):  # not under this name
            importlib.import_module(name)
    figures, _ = run(arguments.stages, arguments.replicas, arguments.repeats)
    counts = figures.pop("sockets")
    rows = [(name, f"{row['seconds']:.3f}", f"{row['cpu_ms']:.1f}") for name, row in figures.items()]
    print_table(
        ("", "seconds", "CPU ms per rank"), [*rows, *((f"sockets: {name}", n, "") for name, n in counts.items())]
    )
    write_json(
        arguments.json, {**figures, "sockets": counts, "stages": arguments.stages, "replicas": arguments.replicas}
    )


if __name__ == "__main__":
    main(sys.argv[1:])
