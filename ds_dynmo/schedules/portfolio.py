"""A search for the shortest order among many candidates: no single rule is the best for all costs.

Candidates are fixed orders (1F1B, gradient-first 1F1B, ZB-H1), the order for equal costs, and greedy orders for the
given costs. Splits that fill no gap are then fused. If a batch is much longer than the pipeline, the search runs with
fewer micro-batches and repeats the steady state.

The search does not depend on the clock, on hashes or on random numbers: equal inputs give equal schedules on all ranks.
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
from ds_dynmo.schedules.order import Orders, SimulatedBatch, run
from ds_dynmo.schedules.repeating import PERIODS, repeated
from ds_dynmo.schedules.schedule import Schedule
from ds_dynmo.schedules.zero_bubble import zb_h1

__all__ = ["POLICIES", "FoundSchedule", "best_schedule", "one_f_one_b_limit", "schedule_for_equal_costs"]

POLICIES = (  # the most useful first: without it the best orders of random pipelines get longest
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
_FOR_EQUAL_COSTS = 4  # place of the order for equal costs among the candidates of POLICIES
MOST_ACTIONS = 120_000  # to simulate in a search, half of them for candidates; 1 to 2 microseconds each
_GOOD_ENOUGH = 1.002  # iteration over the bound at which the search ends
_TIE = 1e-9  # relative difference below which two iterations take the same time
_REFINED = 4  # best candidates whose splits are fused
_TARGETS = (1.0, 1.03)  # target iterations of fusing, over the candidate's iteration


@dataclass(frozen=True)
class FoundSchedule:
    """The result of a search.

    Attributes:
        schedule: the shortest schedule found.
        iteration_seconds: of the schedule, under the costs of the search.
        lower_bound_seconds: of any order.
        peak_bytes: of the passes, per stage.
        actions: number of actions that the search simulated.
        over_bound: iteration over the bound at the time of the search; 0.0 if costs were not measured.
    """

    schedule: Schedule
    iteration_seconds: float
    lower_bound_seconds: float
    peak_bytes: tuple[int, ...]
    actions: int = field(default=0, compare=False)
    over_bound: float = field(default=0.0, compare=False)


def one_f_one_b_limit(sizes: PassBytes, micro_batches: int, memory: float = 1.0) -> tuple[int, ...]:
    """Return, per stage of a chain, ``memory`` times the peak bytes of the neediest stage under 1F1B."""
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
    """Search the shortest order under ``costs`` whose stages stay within their limits.

    Args:
        sizes: bytes per chunk and micro-batch.
        limits: per stage, bytes that its passes may hold.
        start: a first candidate that fits; None: none.
        most_actions: number of actions to simulate, about; at least one candidate is always tried.

    Raises:
        ScheduleError: a limit is below the bytes of one micro-batch; the numbers of chunks or stages differ.
    """
    _check_limits(costs, sizes, limits)
    bound = lower_bound(costs, micro_batches, sizes, limits)
    most = most_actions // 2  # for candidates, and for refinements
    best = _from_fewer_micro_batches(costs, micro_batches, sizes, limits, most) or _candidates(
        costs, micro_batches, sizes, limits, bound, most, start
    )
    results = [(candidate.seconds, candidate.orders) for candidate in best.candidates]
    for candidate in best.candidates[: _affordable(best.candidates[0].orders, most)]:
        targets = [target * candidate.seconds for target in _TARGETS]
        results += fuse(candidate.orders, micro_batches, costs, candidate.simulated, targets)
        best.actions += _length(candidate.orders)
    longest = min(seconds for seconds, _ in results) * (1 + _TIE)
    shortest = (result for result in results if result[0] <= longest)
    seconds, orders = min(shortest, key=lambda result: _length(result[1]))
    schedule = Schedule(costs.owners, micro_batches, tuple(map(tuple, orders)))
    return FoundSchedule(schedule, seconds, bound, peak_bytes(schedule, sizes), best.actions + _length(orders))


def schedule_for_equal_costs(num_stages: int, micro_batches: int, memory: float = 1.0) -> Schedule:
    """Return the shortest order found for a chain that has not been measured yet.

    Args:
        memory: as in :func:`one_f_one_b_limit`.
    """
    costs, sizes = PassCosts.equal(range(num_stages)), PassBytes.equal(num_stages)
    return best_schedule(costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches, memory)).schedule


class _Candidate(NamedTuple):
    """Orders and their simulation."""

    seconds: float
    orders: Orders
    simulated: SimulatedBatch

    @classmethod
    def of(cls, orders: Orders, micro_batches: int, costs: PassCosts) -> _Candidate:
        simulated = run(orders, micro_batches, costs)
        return cls(max(simulated.done), orders, simulated)


class _Best:
    """Different candidates, the shortest first; of equally short ones, the one with the fewest splits."""

    def __init__(self, micro_batches: int, costs: PassCosts) -> None:
        self._micro_batches, self._costs = micro_batches, costs
        self.candidates: list[_Candidate] = []
        self.actions = 0  # simulated so far

    def add(self, orders: Orders) -> None:
        self.actions += _length(orders) // 3  # a replay takes a third of a greedy simulation's time
        new = _Candidate.of(orders, self._micro_batches, self._costs)
        if not any(new.seconds == other.seconds and new.orders == other.orders for other in self.candidates):
            insort(self.candidates, new, key=lambda candidate: (candidate.seconds, _length(candidate.orders)))

    @property
    def seconds_to_beat(self) -> float:
        """The iteration of the last candidate that will be refined, in seconds; infinite if there are fewer."""
        return self.candidates[_REFINED - 1].seconds if len(self.candidates) >= _REFINED else math.inf


def _affordable(orders: Orders, most_actions: int) -> int:
    """Return the number of candidates of this length to fuse."""
    return max(1, min(_REFINED, most_actions // _length(orders)))


def _length(orders: Orders) -> int:
    """Count the actions; each split adds one."""
    return sum(map(len, orders))


def _from_fewer_micro_batches(
    costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int], most_actions: int
) -> _Best | None:
    """Search with fewer micro-batches and repeat the steady state; None if that saves little or nothing repeats."""
    fewer = 2 * costs.num_stages + 2 * max(PERIODS)
    fewer += (micro_batches - fewer) % max(PERIODS)
    if 4 * fewer > 3 * micro_batches:
        return None
    shorter = _candidates(costs, fewer, sizes, limits, lower_bound(costs, fewer, sizes, limits), most_actions)
    longer = _Best(micro_batches, costs)
    longer.actions = shorter.actions
    for candidate in shorter.candidates[: max(2, most_actions // (3 * costs.num_chunks * micro_batches))]:
        orders = repeated(candidate.orders, fewer, micro_batches - fewer)
        if orders is not None:
            longer.add(orders)
    return longer if longer.candidates else None


def _candidates(
    costs: PassCosts,
    micro_batches: int,
    sizes: PassBytes,
    limits: Sequence[int],
    bound_seconds: float,
    most_actions: int,
    start: Orders | None = None,
) -> _Best:
    """Collect orders that fit, ``start`` among them.

    Raises:
        ScheduleError: no order fits.
    """
    best = _Best(micro_batches, costs)
    if start is not None:
        best.add(start)
    if costs.owners == tuple(range(costs.num_stages)):
        for generate in (one_f_one_b, gradient_first_1f1b, zb_h1):
            orders = _unsplit_without_weight_gradients(generate(costs.num_stages, micro_batches).orders, costs)
            if all(peak <= limit for peak, limit in zip(orders_peak_bytes(orders, sizes), limits)):
                best.add(orders)
    tries = [(policy, costs) for policy in POLICIES]
    tries.insert(_FOR_EQUAL_COSTS, (POLICIES[0], PassCosts.equal(costs.owners)))
    simulated_as_run = costs.frozen_chunks == 0
    for tried, (policy, policy_costs) in enumerate(tries):
        too_many = tried > 0 and best.actions > most_actions
        if best.candidates and (too_many or best.candidates[0].seconds <= bound_seconds * _GOOD_ENOUGH):
            break
        most_seconds = best.seconds_to_beat if simulated_as_run and policy_costs is costs else math.inf
        greedy_orders = greedy(policy_costs, micro_batches, sizes, limits, policy, most_seconds=most_seconds)
        best.actions += 3 * costs.num_chunks * micro_batches
        if greedy_orders is not None:
            best.add(_unsplit_without_weight_gradients(greedy_orders, costs))
    if not best.candidates:
        raise ScheduleError(f"no order was found of which stages hold at most {list(limits)} bytes")
    return best


def _unsplit_without_weight_gradients(orders: Orders, costs: PassCosts) -> Orders:
    """Replace the split passes of chunks that have no weight gradients by passes in one."""
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
