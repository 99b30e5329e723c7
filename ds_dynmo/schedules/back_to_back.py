"""Orders for batches that follow each other without a pause.

If stages do not wait for each other at the end of a batch, the first stages start the next batch while the last ones
finish this one. The *period* is the time in seconds from the start of one batch to the start of the next on a stage, in
the steady state. It is shorter than the time of a single batch, because batches overlap. This needs memory: until its
first gradient arrives, a stage can only run forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynmo.schedules.actions import Action
from ds_dynmo.schedules.costs import PassBytes, PassCosts
from ds_dynmo.schedules.fusing import fuse
from ds_dynmo.schedules.greedy import greedy
from ds_dynmo.schedules.memory import orders_peak_bytes, peak_bytes
from ds_dynmo.schedules.order import Orders, run
from ds_dynmo.schedules.portfolio import MOST_ACTIONS, POLICIES, FoundSchedule, best_schedule, one_f_one_b_limit
from ds_dynmo.schedules.schedule import Schedule

__all__ = ["back_to_back_for_equal_costs", "best_back_to_back", "period_seconds", "shortest_period"]

_BATCHES = 5  # to simulate
_WARM_UP = 2  # batches before the period is measured
_LONGEST_ALONE = 1.01  # of an order with a short period: seconds of a single batch, over the shortest found
_GOOD_ENOUGH = 1.002  # period over the bound at which the search ends


def period_seconds(orders: Orders, micro_batches: int, costs: PassCosts) -> float:
    """Return the seconds from one batch to the next if each stage starts a batch as soon as it is done with the last.

    >>> from ds_dynmo.schedules import gradient_first_1f1b, one_f_one_b
    >>> costs = PassCosts.equal(range(2))
    >>> period_seconds(one_f_one_b(2, 4).orders, 4, costs), period_seconds(gradient_first_1f1b(2, 4).orders, 4, costs)
    (15.0, 14.0)
    """
    repeated = [
        [
            Action(kind, chunk, batch * micro_batches + micro_batch)
            for batch in range(_BATCHES)
            for kind, chunk, micro_batch in order
        ]
        for order in orders
    ]
    starts = run(repeated, _BATCHES * micro_batches, costs).starts
    batches = _BATCHES - 1 - _WARM_UP
    return max(
        stage[(_BATCHES - 1) * len(order)] - stage[_WARM_UP * len(order)] for order, stage in zip(orders, starts)
    ) / float(batches)


def shortest_period(costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int]) -> float:
    """Return a lower bound of the period of any order, in seconds, for a chain.

    In each period a stage runs all its passes. It also waits for its first gradient if its memory is full before.
    """
    ahead = [
        (limit - standing) // size if size else micro_batches
        for limit, standing, size in zip(limits, sizes.standing_bytes, sizes.activation_bytes)
    ]
    turn, longest = 0.0, 0.0  # turn: from the start of a chunk's first forward pass to its first gradient
    for chunk in reversed(range(costs.num_chunks)):
        forward, first = costs.forward_seconds[chunk], costs.input_gradient_seconds[chunk]
        turn += forward
        work = forward + min(costs.backward_seconds[chunk], first + costs.weight_gradient_seconds[chunk])
        waits = turn - min(ahead[chunk], micro_batches) * forward if chunk >= costs.frozen_chunks else 0.0
        longest = max(longest, micro_batches * work + max(0.0, waits))
        if chunk:
            turn += min(first, costs.backward_seconds[chunk]) + 2 * costs.link_seconds[chunk - 1]
    return longest


def best_back_to_back(
    costs: PassCosts,
    micro_batches: int,
    sizes: PassBytes,
    limits: Sequence[int],
    *,
    start: Orders | None = None,
    most_actions: int = MOST_ACTIONS,
) -> FoundSchedule:
    """Return the order with the shortest period among those whose single batch is at most 1% above the shortest found.

    Arguments and errors are those of :func:`best_schedule`.
    """
    shortest = best_schedule(costs, micro_batches, sizes, limits, start=start, most_actions=most_actions // 2)
    enough = shortest_period(costs, micro_batches, sizes, limits) * _GOOD_ENOUGH
    best: Orders = shortest.schedule.orders
    best_seconds, period = shortest.iteration_seconds, period_seconds(best, micro_batches, costs)
    passes = 3 * costs.num_chunks * micro_batches
    actions = shortest.actions + passes

    def take_if_shorter(seconds: float, orders: Orders) -> None:
        nonlocal best, best_seconds, period, actions
        actions += _BATCHES * passes // 2
        new_period = period_seconds(orders, micro_batches, costs)
        if seconds <= shortest.iteration_seconds * _LONGEST_ALONE and new_period < period:
            best, best_seconds, period = orders, seconds, new_period

    if start is not None:
        take_if_shorter(max(run(start, micro_batches, costs).done), start)
    for policy in POLICIES:
        if period <= enough or actions > most_actions:
            break
        candidate = greedy(costs, micro_batches, sizes, limits, policy)
        actions += 2 * passes
        if candidate is None or any(peak > limit for peak, limit in zip(orders_peak_bytes(candidate, sizes), limits)):
            continue
        simulated = run(candidate, micro_batches, costs)
        seconds = max(simulated.done)
        take_if_shorter(seconds, candidate)
        for fused_seconds, fused in fuse(candidate, micro_batches, costs, simulated, [seconds]):
            take_if_shorter(fused_seconds, fused)
    schedule = Schedule(costs.owners, micro_batches, tuple(map(tuple, best)))
    return FoundSchedule(schedule, best_seconds, shortest.lower_bound_seconds, peak_bytes(schedule, sizes), actions)


def back_to_back_for_equal_costs(num_stages: int, micro_batches: int, memory: float) -> Schedule:
    """Return the order with the shortest period found for a chain that has not been measured yet.

    Args:
        memory: as in :func:`one_f_one_b_limit`.
    """
    costs, sizes = PassCosts.equal(range(num_stages)), PassBytes.equal(num_stages)
    return best_back_to_back(costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches, memory)).schedule
