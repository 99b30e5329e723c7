"""The shortest of many orders: no single rule is the best one for all costs.

Candidates are fixed orders (1F1B, with the gradient first, ZB-H1), the order for equal costs, and greedy ones for the
costs given. Splits that fill no gap are then taken back. Where a batch is much longer than the pipeline, candidates are
made for fewer micro-batches, and what repeats is repeated.

Nothing here depends on the clock, on hashes or on chance: from the same numbers every rank finds the same schedule.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.bound import lower_bound
from ds_dynmo.schedules.costs import PassBytes, PassCosts
from ds_dynmo.schedules.fusing import fuse
from ds_dynmo.schedules.greedy import Policy, greedy
from ds_dynmo.schedules.memory import orders_peak_bytes, peak_bytes
from ds_dynmo.schedules.one_f_one_b import gradient_first_1f1b, in_flight, one_f_one_b
from ds_dynmo.schedules.order import Orders, Run, run
from ds_dynmo.schedules.repeating import PERIODS, repeated
from ds_dynmo.schedules.schedule import Schedule
from ds_dynmo.schedules.zero_bubble import zb_h1

__all__ = ["POLICIES", "FoundSchedule", "best_schedule", "one_f_one_b_limit", "schedule_for_equal_costs"]

POLICIES = (  # those first without which the best order of random pipelines gets longest
    Policy(),
    Policy(forward_patience=0.5, weight_patience=0.5),
    Policy(split_first=0.0, split_last=1.0),
    Policy(lead=1.75, weight_patience=0.5),
    Policy(alternate=False, weight_patience=0.5, lead=2.0),
    Policy(lead=1.75),
    Policy(weight_patience=0.5),
    Policy(lead=1.75, weight_patience=0.5, split_first=0.5, split_last=0.5),
    Policy(split_first=0.0, split_last=0.5),
    Policy(split_first=0.5, split_last=1.0),
    Policy(lead=1.75, split_first=0.5, split_last=0.5),
    Policy(split_first=1.0, split_last=0.5),
    Policy(lead=1.5, split_first=0.0, split_last=0.0),
)
_FOR_EQUAL_COSTS = 4  # so many policies come before the order for equal costs
MOST_ACTIONS = 120_000  # simulated by a search, half of them for candidates; each takes a microsecond or two
_GOOD_ENOUGH = 1.002  # times the bound: nothing more is tried
_TIE = 1e-9  # relative difference below which two iterations take the same time
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
        actions: that were simulated to find it.
        over_bound: what it took, over the bound, when it was searched; 0.0: not under costs that were measured.
    """

    schedule: Schedule
    iteration_seconds: float
    lower_bound_seconds: float
    peak_bytes: tuple[int, ...]
    actions: int = field(default=0, compare=False)
    over_bound: float = field(default=0.0, compare=False)


def one_f_one_b_limit(sizes: PassBytes, micro_batches: int, memory: float = 1.0) -> tuple[int, ...]:
    """Per stage of a chain, ``memory`` times the bytes that the stage which needs most holds under 1F1B."""
    stages = len(sizes.activation_bytes)
    most = max(
        standing + in_flight(stage, stages, micro_batches) * activations + recomputed
        for stage, (standing, activations, recomputed) in enumerate(
            zip(sizes.standing_bytes, sizes.activation_bytes, sizes.recomputed_bytes)
        )
    )
    return (math.floor(memory * most),) * stages


def best_schedule(
    costs: PassCosts,
    micro_batches: int,
    sizes: PassBytes,
    limits: Sequence[int],
    *,
    start: Orders | None = None,
    most_actions: int = MOST_ACTIONS,
) -> FoundSchedule:
    """The shortest order found under ``costs`` of which no stage holds more than its limit.

    Args:
        sizes: bytes per chunk and micro-batch.
        limits: per stage, bytes that its passes may hold.
        start: an order that fits, to begin with; None: none is known.
        most_actions: that candidates and refinements may simulate, about; one candidate is always tried.

    Raises:
        ScheduleError: a limit is below what one micro-batch needs; unlike numbers of chunks or stages.
    """
    _check_limits(costs, sizes, limits)
    bound = lower_bound(costs, micro_batches, sizes, limits)
    most = most_actions // 2  # for candidates, and for refinements
    best = _stretched(costs, micro_batches, sizes, limits, most) or _candidates(
        costs, micro_batches, sizes, limits, bound, most, start
    )
    made = [(candidate.seconds, candidate.orders) for candidate in best.found]
    for candidate in best.found[: _affordable(best.found[0].orders, most)]:
        targets = [target * candidate.seconds for target in _TARGETS]
        made += fuse(candidate.orders, micro_batches, costs, candidate.ran, targets)
        best.actions += _length(candidate.orders)
    shortest = min(seconds for seconds, _ in made) * (1 + _TIE)
    seconds, orders = min((one for one in made if one[0] <= shortest), key=lambda one: _length(one[1]))
    schedule = Schedule(costs.owners, micro_batches, tuple(map(tuple, orders)))
    return FoundSchedule(schedule, seconds, bound, peak_bytes(schedule, sizes), best.actions + _length(orders))


def schedule_for_equal_costs(num_stages: int, micro_batches: int, memory: float = 1.0) -> Schedule:
    """The shortest order found of a chain of which nothing has been measured yet.

    Args:
        memory: as in :func:`one_f_one_b_limit`.
    """
    costs, sizes = PassCosts.equal(range(num_stages)), PassBytes.equal(num_stages)
    return best_schedule(costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches, memory)).schedule


class _Candidate(NamedTuple):
    """Orders, and what they come to."""

    seconds: float
    orders: Orders
    ran: Run

    @classmethod
    def of(cls, orders: Orders, micro_batches: int, costs: PassCosts) -> _Candidate:
        ran = run(orders, micro_batches, costs)
        return cls(max(ran.done), orders, ran)


class _Best:
    """Different candidates, the shortest first; of as short ones that with the fewest splits."""

    def __init__(self, micro_batches: int, costs: PassCosts) -> None:
        self._micro_batches, self._costs = micro_batches, costs
        self.found: list[_Candidate] = []
        self.actions = 0  # simulated

    def add(self, orders: Orders) -> None:
        self.actions += _length(orders) // 3  # a replay takes a third of the time
        one = _Candidate.of(orders, self._micro_batches, self._costs)
        if not any(one.seconds == other.seconds and one.orders == other.orders for other in self.found):
            insort(self.found, one, key=lambda candidate: (candidate.seconds, _length(candidate.orders)))

    @property
    def seconds_to_beat(self) -> float:
        """What a candidate may take at most that is worth a refinement."""
        return self.found[_REFINED - 1].seconds if len(self.found) >= _REFINED else math.inf


def _affordable(orders: Orders, most_actions: int) -> int:
    """Of how many candidates of this size splits are taken back."""
    return max(1, min(_REFINED, most_actions // _length(orders)))


def _length(orders: Orders) -> int:
    """How many actions: each split adds one."""
    return sum(map(len, orders))


def _stretched(
    costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int], most_actions: int
) -> _Best | None:
    """The best candidates for fewer micro-batches, repeated; None where few would be left out, or nothing repeats."""
    fewer = 2 * costs.num_stages + 2 * max(PERIODS)
    fewer += (micro_batches - fewer) % max(PERIODS)
    if 4 * fewer > 3 * micro_batches:
        return None
    shorter = _candidates(costs, fewer, sizes, limits, lower_bound(costs, fewer, sizes, limits), most_actions)
    longer = _Best(micro_batches, costs)
    longer.actions = shorter.actions
    for candidate in shorter.found[: max(2, most_actions // (3 * costs.num_chunks * micro_batches))]:
        orders = repeated(candidate.orders, fewer, micro_batches - fewer)
        if orders is not None:
            longer.add(orders)
    return longer if longer.found else None


def _candidates(
    costs: PassCosts,
    micro_batches: int,
    sizes: PassBytes,
    limits: Sequence[int],
    bound_seconds: float,
    most_actions: int,
    start: Orders | None = None,
) -> _Best:
    """Orders that fit, the shortest first; ``start`` is one of them.

    Raises:
        ScheduleError: none fits.
    """
    best = _Best(micro_batches, costs)
    if start is not None:
        best.add(start)
    if costs.owners == tuple(range(costs.num_stages)):
        for generate in (one_f_one_b, gradient_first_1f1b, zb_h1):
            orders = _unsplit_where_nothing_waits(generate(costs.num_stages, micro_batches).orders, costs)
            if all(peak <= limit for peak, limit in zip(orders_peak_bytes(orders, sizes), limits)):
                best.add(orders)
    tries = [(policy, costs) for policy in POLICIES]
    tries.insert(_FOR_EQUAL_COSTS, (POLICIES[0], PassCosts.equal(costs.owners)))
    simulated_as_run = costs.frozen_chunks == 0
    for tried, (policy, seen) in enumerate(tries):
        too_many = tried > 0 and best.actions > most_actions
        if best.found and (too_many or best.found[0].seconds <= bound_seconds * _GOOD_ENOUGH):
            break
        most_seconds = best.seconds_to_beat if simulated_as_run and seen is costs else math.inf
        made = greedy(seen, micro_batches, sizes, limits, policy, most_seconds=most_seconds)
        best.actions += 3 * costs.num_chunks * micro_batches
        if made is not None:
            best.add(_unsplit_where_nothing_waits(made, costs))
    if not best.found:
        raise ScheduleError(f"no order was found of which stages hold at most {list(limits)} bytes")
    return best


def _unsplit_where_nothing_waits(orders: Orders, costs: PassCosts) -> Orders:
    """Without the split of chunks that have no weight gradients."""
    whole = {chunk for chunk, seconds in enumerate(costs.weight_gradient_seconds) if seconds == 0}
    if not whole:
        return tuple(map(tuple, orders))
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
