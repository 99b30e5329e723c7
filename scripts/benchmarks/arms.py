"""Engines that take turns, one per balancer, timed on the slowest rank."""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from benchmarks.rows import Costs, Slice
from ds_dynmo.plan import RebalanceReport, reports_after
from simulation.runs import ARMS, BALANCERS, DYNAMIC
from simulation.statics import STATICS, Statics

ALWAYS = (*STATICS, "dense")  # what others are compared with
NEVER = 1_000_000  # batches


@dataclass
class Arm:
    """A balancer's engine and what it has done: slices, by round.

    Attributes:
        schedule: ``dynmo.schedule.kind``; None: the arm is compared with those of every schedule.
    """

    name: str
    engine: Any
    schedule: str | None = None
    rounds: list[list[Slice]] = field(default_factory=list)
    _last_report: RebalanceReport | None = None

    @property
    def dynamic(self) -> bool:
        return self.name in DYNAMIC

    def new_costs(self) -> Costs:
        """Sum the seconds of the rebalances since the last call, which rank 0 reports. Collective.

        Gathering a profile begins with a wait for the other ranks' batch. Rank 0, whose last pass ends a batch, waits
        least.
        """
        reports = reports_after(self._last_report, self.engine.reports)
        self._last_report = reports[-1] if reports else self._last_report
        parts = [(one.profile_seconds, one.decide_seconds, one.migrate_seconds) for one in reports]
        profile, decide, migrate = most_over_ranks([sum(column) for column in zip((0.0, 0.0, 0.0), *parts)])
        return profile, decide, migrate


def last_report(engine: Any) -> RebalanceReport:
    """Return the latest report, which rank 0 has, on every rank. Collective."""
    box = [engine.reports[-1] if engine.reports else None]
    torch.distributed.broadcast_object_list(box)
    report = box[0]
    assert report is not None
    return report


def chosen(asked: Sequence[str] | None, known: Statics) -> list[str]:
    """Choose the arms to run: the requested ones and their baselines, and one of equal static arms."""
    return [arm for arm in ARMS if (not asked or arm in (*asked, *ALWAYS)) and arm not in known.alike]


def arm_block(arm: str, block: dict[str, Any]) -> dict[str, Any]:
    """Make the "dynmo" section of an arm; ``block`` is that of arms that rebalance.

    The dense arm and the oracle take a profile when they are told to, and never move by themselves.
    """
    if arm in STATICS:
        return {"enabled": False, "log": False}
    if arm in ("oracle", "dense"):
        return {"interval": 0, "min_improvement": 0.99, "profile": {"warmup_batches": NEVER}, "log": False}
    balancer, balance_by = BALANCERS[arm]
    return {**block, "balancer": balancer, "balance_by": balance_by, "log": False}


def timed(batch: Callable[[], Any]) -> float:
    """Measure the wall-clock seconds until the last rank's device is done, with the rebalance that may follow.

    Collective.
    """
    wait_for_all()
    began = time.perf_counter()
    batch()
    wait_for_all()
    return time.perf_counter() - began


def wait_for_all() -> None:
    """Wait until the devices of all ranks have done what they were given. Collective."""
    get_accelerator().synchronize()
    torch.distributed.barrier()


def most_over_ranks(numbers: Sequence[float]) -> list[float]:
    """Take the largest of all ranks' numbers, one by one. Collective."""
    most = torch.tensor(numbers, dtype=torch.float64, device=get_accelerator().current_device_name())
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return most.tolist()


def least_over_ranks(seconds: float) -> float:
    """Take the least over all ranks: gathering begins with a wait for the others' batch. Collective."""
    return -most_over_ranks([-seconds])[0]


def profiling_seconds(arm: Arm, batch: Callable[[], Any], pairs: int) -> float:
    """Measure the extra seconds of a profiled batch over a plain one, in turns, on an engine that never moves."""
    extra = []
    for pair in range(pairs):
        seconds = {}
        for profiled in turns((False, True), pair):
            if profiled:
                arm.engine.model_changed("measure")
            seconds[profiled] = timed(batch) - sum(arm.new_costs())
        extra.append(seconds[True] - seconds[False])
    return max(0.0, statistics.median(extra))


@contextlib.contextmanager
def engines_end_here() -> Iterator[None]:
    """Destroy at the end the process groups of engines made within, because each holds sockets and threads.

    Neither torch nor DeepSpeed has a public list of them.
    """
    before = set(distributed_c10d._world.pg_map)
    yield
    gc.collect()
    torch.distributed.barrier()
    for group in set(distributed_c10d._world.pg_map) - before:
        torch.distributed.destroy_process_group(group)


def turns(arms: Sequence[Any], number: int) -> list[Any]:
    """Reverse every other round, so that no engine always comes first."""
    return list(arms) if number % 2 == 0 else list(reversed(arms))


def say(what: str) -> None:
    """Print progress, on rank 0."""
    if torch.distributed.get_rank() == 0:
        print(what, file=sys.stderr, flush=True)
