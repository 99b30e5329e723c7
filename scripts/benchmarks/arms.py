"""Engines that take turns: one per balancer, timed on the slowest rank."""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import distributed_c10d

from benchmarks.rows import Costs, Slice
from simulation.runs import DYNAMIC


@dataclass
class Arm:
    """A balancer's engine and what it has done: slices, by round."""

    name: str
    engine: Any
    rounds: list[list[Slice]] = field(default_factory=list)
    _reports_seen: int = 0

    @property
    def dynamic(self) -> bool:
        return self.name in DYNAMIC

    def new_costs(self) -> Costs:
        """Seconds of the rebalances since the last call. Collective.

        On the slowest rank; but gathering a profile begins with waiting for the others to end their batch, so that it
        is what it takes the rank that waits least.
        """
        reports = self.engine.reports[self._reports_seen :]
        self._reports_seen += len(reports)
        parts: list[Callable[[Any], float]] = [
            lambda report: report.profile_seconds,
            lambda report: report.decide_seconds,
            lambda report: report.migrate_seconds,
        ]
        seconds = torch.tensor([sum(map(part, reports)) for part in parts], dtype=torch.float64)
        seconds[0] *= -1
        torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
        profile, decide, migrate = seconds.tolist()
        return -profile, decide, migrate


def timed(batch: Callable[[], Any]) -> float:
    """Wall-clock seconds until the last rank is done, with the rebalance that may follow. Collective."""
    torch.distributed.barrier()
    began = time.perf_counter()
    batch()
    torch.distributed.barrier()
    return time.perf_counter() - began


def profiling_seconds(arm: Arm, batch: Callable[[], Any], pairs: int) -> float:
    """By how much a profiled batch takes longer than a plain one, in turns, on an engine that never moves."""
    extra = []
    for pair in range(pairs):
        seconds = {}
        for profiled in (True, False) if pair % 2 else (False, True):
            if profiled:
                arm.engine.model_changed("measure")
            seconds[profiled] = timed(batch) - sum(arm.new_costs())
        extra.append(seconds[True] - seconds[False])
    return max(0.0, statistics.median(extra))


def quietly(make: Callable[[], Any]) -> Any:
    """What ``make`` makes, without the lines that DeepSpeed prints about each layer meanwhile."""
    with contextlib.redirect_stdout(io.StringIO()):
        return make()


@contextlib.contextmanager
def engines_end_here() -> Iterator[None]:
    """Process groups that engines make within are destroyed at its end: each of them holds sockets and threads.

    Neither torch nor DeepSpeed has a public list of them.
    """
    before = set(distributed_c10d._world.pg_map)
    yield
    gc.collect()
    torch.distributed.barrier()
    for group in set(distributed_c10d._world.pg_map) - before:
        torch.distributed.destroy_process_group(group)


def turns(arms: Sequence[Any], number: int) -> list[Any]:
    """Every other round backwards, so that no engine always comes first."""
    return list(arms) if number % 2 == 0 else list(reversed(arms))


def say(what: str) -> None:
    """Progress, on rank 0."""
    if torch.distributed.get_rank() == 0:
        print(what, file=sys.stderr, flush=True)
