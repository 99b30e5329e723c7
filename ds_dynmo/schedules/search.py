"""Search a short order for given costs: the shortest of a few candidates.

Candidates are fixed orders (1F1B, gradient-first 1F1B, ZB-H1) and greedy orders for these costs and for equal ones,
each also with the splits fused that fill no gap. A search does not depend on the clock, on hashes or on random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.back_to_back import period_seconds
from ds_dynmo.schedules.bound import lower_bound
from ds_dynmo.schedules.costs import PassBytes, PassCosts
from ds_dynmo.schedules.fusing import fuse
from ds_dynmo.schedules.greedy import greedy
from ds_dynmo.schedules.memory import orders_peak_bytes, peak_bytes
from ds_dynmo.schedules.one_f_one_b import gradient_first_1f1b, in_flight, one_f_one_b
from ds_dynmo.schedules.order import Orders, run
from ds_dynmo.schedules.schedule import Schedule
from ds_dynmo.schedules.zero_bubble import zb_h1

__all__ = ["FoundSchedule", "best_schedule", "one_f_one_b_limit", "schedule_for_equal_costs"]

_TIE = 1e-9  # relative difference below which two iterations take the same time
_LONGEST_ALONE = 1.01  # of an order with a short period: seconds of a single batch, over the shortest found


@dataclass(frozen=True)
class FoundSchedule:
    """The result of a search.

    Attributes:
        schedule: the shortest schedule found.
        iteration_seconds: of the schedule, under the costs of the search.
        lower_bound_seconds: of any order.
        peak_bytes: of the passes, per stage.
        over_bound: iteration over the bound at the time of the search; 0.0 if costs were not measured.
    """

    schedule: Schedule
    iteration_seconds: float
    lower_bound_seconds: float
    peak_bytes: tuple[int, ...]
    over_bound: float = field(default=0.0, compare=False)


class _Candidate(NamedTuple):
    """Orders, and the seconds of one batch."""

    seconds: float
    orders: Orders


def one_f_one_b_limit(
    sizes: PassBytes, micro_batches: int, memory: float = 1.0, *, owners: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return, per stage, ``memory`` times the peak bytes of the neediest stage under 1F1B.

    With several chunks per stage, every stage counts with as many micro-batches in flight as the first one of a chain.

    Args:
        owners: per chunk, the stage that holds it; (): a chain.
    """
    owners = tuple(owners) or tuple(range(len(sizes.activation_bytes)))
    stages = max(owners) + 1
    most = 0
    for stage in range(stages):
        mine = [chunk for chunk, owner in enumerate(owners) if owner == stage]
        ahead = in_flight(stage if len(mine) == 1 else 0, stages, micro_batches)
        held = sum(sizes.standing_bytes[chunk] + ahead * sizes.activation_bytes[chunk] for chunk in mine)
        most = max(most, held + max(sizes.recomputed_bytes[chunk] for chunk in mine))
    return (math.floor(memory * most),) * stages


def best_schedule(
    costs: PassCosts,
    micro_batches: int,
    sizes: PassBytes,
    limits: Sequence[int],
    *,
    start: Orders | None = None,
    back_to_back: bool = False,
) -> FoundSchedule:
    """Search the shortest order under ``costs`` whose stages stay within their limits.

    Args:
        sizes: bytes per chunk and micro-batch.
        limits: per stage, bytes that its passes may hold.
        start: one more candidate, which fits; None: none.
        back_to_back: take the order with the shortest period, if its single batch is at most 1% above the shortest.

    Raises:
        ScheduleError: a limit is below the bytes of one micro-batch; the numbers of chunks or stages differ.
    """
    _check_limits(costs, sizes, limits)
    candidates = _with_fused(_fitting(costs, micro_batches, sizes, limits), start, micro_batches, costs)
    if not candidates:
        raise ScheduleError(f"no order was found of which stages hold at most {list(limits)} bytes")
    shortest = min(seconds for seconds, _ in candidates)
    if back_to_back:
        alone = (candidate for candidate in candidates if candidate.seconds <= shortest * _LONGEST_ALONE)
        best = min(alone, key=lambda candidate: period_seconds(candidate.orders, micro_batches, costs))
    else:
        alike = (candidate for candidate in candidates if candidate.seconds <= shortest * (1 + _TIE))
        best = min(alike, key=lambda candidate: sum(map(len, candidate.orders)))  # each split adds an action
    schedule = Schedule(costs.owners, micro_batches, tuple(map(tuple, best.orders)))
    bound = lower_bound(costs, micro_batches, sizes, limits)
    return FoundSchedule(schedule, best.seconds, bound, peak_bytes(schedule, sizes))


def schedule_for_equal_costs(
    num_stages: int, micro_batches: int, memory: float = 1.0, *, back_to_back: bool = False
) -> Schedule:
    """Return the order that :func:`best_schedule` finds for a chain that has not been measured yet.

    Args:
        memory: as in :func:`one_f_one_b_limit`.
    """
    costs, sizes = PassCosts.equal(range(num_stages)), PassBytes.equal(num_stages)
    limits = one_f_one_b_limit(sizes, micro_batches, memory)
    return best_schedule(costs, micro_batches, sizes, limits, back_to_back=back_to_back).schedule


def _fitting(costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int]) -> Iterable[Orders]:
    """Generate the orders that fit."""
    if costs.owners == tuple(range(costs.num_stages)):
        for generate in (one_f_one_b, gradient_first_1f1b, zb_h1):
            orders = _unsplit_without_weight_gradients(generate(costs.num_stages, micro_batches).orders, costs)
            if all(peak <= limit for peak, limit in zip(orders_peak_bytes(orders, sizes), limits)):
                yield orders
    for supposed in (costs, PassCosts.equal(costs.owners)):
        made = greedy(supposed, micro_batches, sizes, limits)
        if made is not None:
            yield _unsplit_without_weight_gradients(made, costs)


def _with_fused(
    fitting: Iterable[Orders], start: Orders | None, micro_batches: int, costs: PassCosts
) -> list[_Candidate]:
    """Simulate orders, and the same with the splits fused that fill no gap."""
    candidates = []
    for orders in [*([] if start is None else [start]), *fitting]:
        simulated = run(orders, micro_batches, costs)
        candidates.append(_Candidate(max(simulated.done), orders))
        candidates.append(_Candidate(*fuse(orders, micro_batches, costs, simulated)))
    return candidates


def _unsplit_without_weight_gradients(orders: Orders, costs: PassCosts) -> Orders:
    """Replace the split passes of chunks that have no weight gradients by passes in one."""
    whole = {chunk for chunk, seconds in enumerate(costs.weight_gradient_seconds) if seconds == 0}
    if not whole:
        return orders
    return tuple(
        tuple(
            Action(Kind.BACKWARD if kind == Kind.INPUT_GRADIENT and chunk in whole else kind, chunk, micro_batch)
            for kind, chunk, micro_batch in order
            if kind != Kind.WEIGHT_GRADIENT or chunk not in whole
        )
        for order in orders
    )


def _check_limits(costs: PassCosts, sizes: PassBytes, limits: Sequence[int]) -> None:
    if len(sizes.activation_bytes) != costs.num_chunks or len(limits) != costs.num_stages:
        raise ScheduleError(
            f"{costs.num_chunks} chunks on {costs.num_stages} stages need bytes of each chunk and a limit of each "
            f"stage, got {len(sizes.activation_bytes)} and {len(limits)}"
        )
    for stage, limit in enumerate(limits):
        mine = costs.chunks_of(stage)
        least = sum(sizes.activation_bytes[chunk] for chunk in mine) + max(sizes.recomputed_bytes[c] for c in mine)
        if least > limit:
            raise ScheduleError(
                f"stage {stage} may hold {limit} bytes of passes, one micro-batch needs {least} bytes there"
            )
