"""Workloads under DeepSpeed's 1F1B and under a schedule of ours: equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_dynmo.engine.run.schedule_in_force import NextSchedule, ScheduleInForce
from ds_dynmo.placement import Placement
from tests.support.configs import SECTION
from tests.support.harness import run


def under(kind: str, function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Run a workload under a schedule, unless it names one. Return also how many batches ran our own schedule."""
    ours, bare = [], ScheduleInForce.next

    def watched(self: ScheduleInForce, placement: Placement, micro_batches: int) -> NextSchedule:
        ours.append(self.schedule_for(placement, micro_batches) is not None)
        return bare(self, placement, micro_batches)

    SECTION["schedule"] = {"kind": kind}
    ScheduleInForce.next = watched  # type: ignore[method-assign]
    try:
        return function(*args), sum(ours)
    finally:
        del SECTION["schedule"]
        ScheduleInForce.next = bare  # type: ignore[method-assign]


DIFFER = {"attributes", "reports", "summaries"}  # they hold seconds, or buffers


def comparable(found: Any) -> Any:
    """Leave out what differs between equal runs."""
    if isinstance(found, list):
        return [comparable(one) for one in found]
    if isinstance(found, dict):
        return {key: value for key, value in found.items() if key not in DIFFER}
    return found


def check_as_under_1f1b(ranks: int, function: Callable[..., Any], *args: Any) -> None:
    """Check that each rank has the same under a schedule of ours: layers are at the same places."""
    check_equal(*(run(ranks, under, kind, function, *args) for kind in ("1f1b", "zero_bubble")))


def check_equal(stock: list[tuple[Any, int]], ours: list[tuple[Any, int]]) -> None:
    """Check results of :func:`under` by rank, under 1F1B and under a schedule of ours."""
    assert [count for _, count in stock] == [0] * len(stock)
    assert all(count > 0 for _, count in ours)
    for (expected, _), (found, _) in zip(stock, ours, strict=True):
        assert comparable(found) == comparable(expected)
