"""The shortest of many orders: no single rule is the best one for all costs.

Candidates are fixed orders (1F1B, with the gradient first, ZB-H1), the order for equal costs, and greedy ones for the
costs given. Splits that fill no gap are then taken back. Where a batch is much longer than the pipeline, candidates are
made for fewer micro-batches, and what repeats is repeated.

Nothing here depends on the clock, on hashes or on chance: from the same numbers every rank finds the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.bound import lower_bound
from ds_dynmo.schedules.costs import PassBytes, PassCosts
from ds_dynmo.schedules.fusing import fuse
from ds_dynmo.schedules.greedy import Policy, greedy
from ds_dynmo.schedules.memory import orders_peak_bytes, peak_bytes
from ds_dynmo.schedules.one_f_one_b import gradient_first_1f1b, one_f_one_b
from ds_dynmo.schedules.order import Orders, run
from ds_dynmo.schedules.repeating import PERIODS, repeated
from ds_dynmo.schedules.schedule import Schedule
from ds_dynmo.schedules.zero_bubble import zb_h1

__all__ = ["POLICIES", "FoundSchedule", "best_schedule", "one_f_one_b_limit", "schedule_for_equal_costs"]

POLICIES = (
    Policy(),
    Policy(lead=1.75),
    Policy(lead=1.75, split_first=0.5, split_last=0.5),
    Policy(forward_patience=0.5, weight_patience=0.5),
    Policy(split_first=0.0, split_last=1.0),
    Policy(weight_patience=0.5),
    Policy(split_first=0.5, split_last=1.0),
    Policy(lead=1.75, weight_patience=0.5),
    Policy(split_first=0.0, split_last=0.5),
    Policy(alternate=False, weight_patience=0.5, lead=2.0),
    Policy(lead=1.75, weight_patience=0.5, split_first=0.5, split_last=0.5),
    Policy(split_first=1.0, split_last=0.5),
    Policy(lead=1.5, split_first=0.0, split_last=0.0),
)
_MOST_ACTIONS = 60_000  # of greedy candidates together; each costs some microseconds
_GOOD_ENOUGH = 1.002  # times the bound: nothing more is tried
_REFINED = 4  # candidates, the best ones, of which splits are taken back
_TARGETS = (1.0, 1.03)  # iterations, over the candidate's own, in which splits are to be needless


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule and what it comes to.

    Attributes:
        schedule: the shortest that was found.
        iteration_seconds: that it takes under the costs it was made for.
        lower_bound_seconds: below which no order can be.
        peak_bytes: per stage, of its passes.
    """

    schedule: Schedule
    iteration_seconds: float
    lower_bound_seconds: float
    peak_bytes: tuple[int, ...]


def one_f_one_b_limit(sizes: PassBytes, micro_batches: int, memory: float = 1.0) -> tuple[int, ...]:
    """Per stage of a chain, ``memory`` times the bytes that the stage which needs most holds under 1F1B."""
    stages = len(sizes.activation_bytes)
    most = max(peak_bytes(one_f_one_b(stages, min(stages, micro_batches)), sizes))
    return (math.floor(memory * most),) * stages


def best_schedule(costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int]) -> FoundSchedule:
    """The shortest order found under ``costs`` of which no stage holds more than its limit.

    Args:
        sizes: bytes per chunk and micro-batch.
        limits: per stage, bytes that its passes may hold.

    Raises:
        ScheduleError: a limit is below what one micro-batch needs; unlike numbers of chunks or stages.
    """
    _check_limits(costs, sizes, limits)
    found = _stretched(costs, micro_batches, sizes, limits) or _candidates(costs, micro_batches, sizes, limits)
    found += [_fused(candidate, micro_batches, costs) for candidate in found[: _affordable(found[0].orders)]]
    best = min(found, key=lambda candidate: candidate.seconds)
    schedule = Schedule(costs.owners, micro_batches, tuple(map(tuple, best.orders)))
    bound = lower_bound(costs, micro_batches, sizes, limits)
    return FoundSchedule(schedule, best.seconds, bound, peak_bytes(schedule, sizes))


def schedule_for_equal_costs(num_stages: int, micro_batches: int, memory: float = 1.0) -> Schedule:
    """The shortest order found of a chain of which nothing has been measured yet.

    Args:
        memory: as in :func:`one_f_one_b_limit`.
    """
    costs, sizes = PassCosts.equal(range(num_stages)), PassBytes.equal(num_stages)
    return best_schedule(costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches, memory)).schedule


class _Candidate(NamedTuple):
    seconds: float
    orders: Orders


def _affordable(orders: Orders) -> int:
    """Of how many candidates of this size splits are taken back."""
    return max(1, min(_REFINED, _MOST_ACTIONS // sum(map(len, orders))))


def _stretched(costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int]) -> list[_Candidate]:
    """The best candidates for fewer micro-batches, repeated; none where few would be left out, or nothing repeats."""
    fewer = 2 * costs.num_stages + 2 * max(PERIODS)
    fewer += (micro_batches - fewer) % max(PERIODS)
    if 4 * fewer > 3 * micro_batches:
        return []
    shorter = _candidates(costs, fewer, sizes, limits)
    shorter = shorter[: max(_REFINED, _MOST_ACTIONS // (3 * costs.num_chunks * micro_batches))]
    longer = (repeated(candidate.orders, fewer, micro_batches - fewer) for candidate in shorter)
    return _sorted([_Candidate(_seconds(one, micro_batches, costs), one) for one in longer if one is not None])


def _candidates(costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int]) -> list[_Candidate]:
    """Orders that fit, the shortest first; of as short ones the first that was tried.

    Raises:
        ScheduleError: none fits.
    """
    enough = lower_bound(costs, micro_batches, sizes, limits) * _GOOD_ENOUGH
    found: list[_Candidate] = []

    def add(orders: Orders) -> None:
        orders = _unsplit_where_nothing_waits(orders, costs)
        if all(peak <= limit for peak, limit in zip(orders_peak_bytes(orders, sizes), limits)):
            found.append(_Candidate(_seconds(orders, micro_batches, costs), orders))

    if costs.owners == tuple(range(costs.num_stages)):
        for generate in (one_f_one_b, gradient_first_1f1b, zb_h1):
            add(generate(costs.num_stages, micro_batches).orders)
    actions = 0
    equal = PassCosts.equal(costs.owners)
    for policy, seen in ((POLICIES[0], costs), (POLICIES[0], equal), *((policy, costs) for policy in POLICIES[1:])):
        if found and (actions > _MOST_ACTIONS or min(one.seconds for one in found) <= enough):
            break
        made = greedy(seen, micro_batches, sizes, limits, policy)
        if made is not None:
            add(made)
            actions += sum(map(len, made))
    if not found:
        raise ScheduleError(f"no order was found of which stages hold at most {list(limits)} bytes")
    return _sorted(found)


def _unsplit_where_nothing_waits(orders: Orders, costs: PassCosts) -> Orders:
    """Without the split of chunks that have no weight gradients."""
    whole = {chunk for chunk, seconds in enumerate(costs.weight_gradient_seconds) if seconds == 0}
    if not whole:
        return orders
    return [
        [
            Action(Kind.BACKWARD if kind == Kind.INPUT_GRADIENT and chunk in whole else kind, chunk, micro_batch)
            for kind, chunk, micro_batch in order
            if kind != Kind.WEIGHT_GRADIENT or chunk not in whole
        ]
        for order in orders
    ]


def _fused(candidate: _Candidate, micro_batches: int, costs: PassCosts) -> _Candidate:
    """Without the splits that fill no gap; of two ways the shorter."""
    ways = []
    for target in _TARGETS:
        orders = fuse(candidate.orders, micro_batches, costs, target * candidate.seconds)
        ways.append(_Candidate(_seconds(orders, micro_batches, costs), orders))
    return min(ways, key=lambda way: way.seconds)


def _sorted(candidates: list[_Candidate]) -> list[_Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def _seconds(orders: Orders, micro_batches: int, costs: PassCosts) -> float:
    return max(run(orders, micro_batches, costs).done)


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
