"""Measure what each process holds after more and more moves, and after more and more re-packs: it has to be flat.

A process that moves layers for weeks must not gather memory, sockets, threads, open files or process groups. Flat
means: the counts after each milestone are those after the first, which has torch's and gloo's first connections behind
it; and memory has grown by less than ``MIB`` from the second milestone to the last.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch.distributed as dist

from ds_dynmo.engine.comm.posted import wait_for_posted
from tests.endurance.plan import random_partition
from tests.support.configs import Case
from tests.support.harness import run
from tests.support.training import batches, build

MIB = 8.0
SECONDS = 3600.0
STAGES = 3
CASES = {
    "fp32, tied, 1F1B": Case(stages=STAGES, tied=True, groups="two", dynmo={"interval": 0}),
    "bf16, ZeRO-1, V": Case(
        stages=STAGES, precision="bf16 zero1", groups="two", dynmo={"interval": 0, "schedule": "v"}
    ),
}


@dataclass(frozen=True)
class Held:
    """What a process holds.

    Attributes:
        mib: its memory (RSS), after garbage was collected and freed memory given back.
        files: open ones, sockets not counted.
        groups: process groups of torch.
    """

    mib: float
    sockets: int
    threads: int
    files: int
    groups: int

    @classmethod
    def now(cls) -> Held:
        """Look at this process."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        process = psutil.Process()
        links = [os.readlink(path) for path in map(str, Path("/proc/self/fd").iterdir()) if os.path.islink(path)]
        sockets = sum(link.startswith("socket:") for link in links)
        groups = len(dist.distributed_c10d._world.pg_map)
        rss = process.memory_info().rss / 2**20
        return cls(round(rss, 1), sockets, process.num_threads(), len(links) - sockets, groups)


def measure(*, moves: int, repacks: int) -> int:
    """Measure both, print tables, and return 1 if one is not flat."""
    flat = True
    for name, case in CASES.items():
        for what, function, number in (("moves", move_often, moves), ("re-packs", repack_often, repacks)):
            milestones = [each for each in (10, 100, 1000, 10_000) if each < number] + [number]
            flat &= report(f"{what}: {name}", milestones, run(STAGES, function, case, milestones, seconds=SECONDS))
    print("flat" if flat else "NOT FLAT", flush=True)
    return int(not flat)


def report(title: str, milestones: Sequence[int], ranks: list[list[Held]]) -> bool:
    """Print a table, and return whether all ranks are flat."""
    names = [field.name for field in fields(Held)]
    print(f"{title}\n{'rank':>4} {'after':>8}" + "".join(f"{name:>10}" for name in names))
    for rank, held in enumerate(ranks):
        for milestone, each in zip(milestones, held, strict=True):
            print(f"{rank:>4} {milestone:>8,}" + "".join(f"{getattr(each, name):>10}" for name in names))
    found = [text for rank, held in enumerate(ranks) for text in _growth(rank, held)]
    print("\n".join([*found, ""]), flush=True)
    return not found


def _growth(rank: int, held: list[Held]) -> Iterator[str]:
    for name in ("sockets", "threads", "files", "groups"):
        numbers = [getattr(each, name) for each in held]
        if max(numbers) > numbers[0]:
            yield f"rank {rank}: {name} grow: {numbers}"
    first, last = held[min(1, len(held) - 2)], held[-1]
    if last.mib - first.mib > MIB:
        yield f"rank {rank}: memory grows by {last.mib - first.mib:.1f} MiB: {[each.mib for each in held]}"


def move_often(case: Case, milestones: Sequence[int]) -> list[Held]:
    """Move layers before every batch, every other time while it trains, and return what this rank holds, on a rank."""
    engine, chooser, held = build(case), random.Random(0), []
    data, two_chunks = batches(engine), (case.dynmo or {}).get("schedule") == "v"
    for number in range(1, milestones[-1] + 1):
        to = random_partition(chooser, case.num_layers, case.stages, has_two_chunks=two_chunks)
        engine.rebalance(to, background=number % 2 == 0)
        engine.train_batch(data)
        if number in milestones:
            held.append(Held.now())
    return held


def repack_often(case: Case, milestones: Sequence[int]) -> list[Held]:
    """Re-pack by engines made one after the other, each in a world of its own, and return what this rank holds.

    Each goes from ``case.stages`` down to one stage. A released rank, whose process would end, waits for the next.
    """
    store, held, repacks, engine = _store(), [], 0, None
    for world in itertools.count():
        _meet(dist.PrefixStore(f"world {world}", store))
        if engine is not None:
            engine.destroy()  # else DeepSpeed's ZeRO-1 keeps the engine
        dist.barrier()  # all ranks have left the world before
        while len(held) < len(milestones) and repacks >= milestones[len(held)]:
            held.append(Held.now())
        if len(held) == len(milestones):
            break
        engine = _repack(case)
        repacks += case.stages - 1
    return held


def _repack(case: Case) -> Any:
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    for stages in range(case.stages - 1, 0, -1):
        if not engine.released:
            engine.repack(stages)
        if not engine.released:
            engine.train_batch(data)
    wait_for_posted()  # as a process does that ends
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()
    return engine


def _store() -> Any:
    """Make the store by which ranks meet, as launchers do: rank 0 serves it."""
    timeout, rank = timedelta(seconds=300), dist.get_rank()
    here = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout) if rank == 0 else None
    ports = [here.port if here is not None else 0]
    dist.broadcast_object_list(ports)
    deepspeed.comm.destroy_process_group()
    return here or dist.TCPStore("127.0.0.1", ports[0], is_master=False, timeout=timeout)


def _meet(store: Any) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.comm.comm.cdb = None
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    deepspeed.init_distributed("gloo")
