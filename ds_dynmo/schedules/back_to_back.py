"""Orders for batches that follow each other without a pause.

Where no stage waits for the others when a batch ends, the first stages begin the next batch while the last ones end
this one. A batch then takes its *period*: the seconds from one to the next on every stage, once many have run. It
is shorter than a batch alone, whose first and last passes no other batch overlaps, if stages have memory for it: until
its first gradient is there, a stage can only run forward passes.
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

_BATCHES, _SETTLED = 5, 2  # that are simulated; the period is that of those after the first
_AS_SHORT = 1.01  # times the shortest batch alone: what an order may take whose period is shorter
_GOOD_ENOUGH = 1.002  # times the bound: nothing more is tried


def period_seconds(orders: Orders, micro_batches: int, costs: PassCosts) -> float:
    """Seconds from one batch to the next where each stage begins it as soon as it has ended the one before.

    >>> from ds_dynmo.schedules import gradient_first_1f1b, one_f_one_b
    >>> costs = PassCosts.equal(range(2))
    >>> period_seconds(one_f_one_b(2, 4).orders, 4, costs), period_seconds(gradient_first_1f1b(2, 4).orders, 4, costs)
    (15.0, 14.0)
    """
    several = [
        [
            Action(kind, chunk, batch * micro_batches + micro_batch)
            for batch in range(_BATCHES)
            for kind, chunk, micro_batch in order
        ]
        for order in orders
    ]
    starts = run(several, _BATCHES * micro_batches, costs).starts
    batches = _BATCHES - 1 - _SETTLED
    return max(
        begun[(_BATCHES - 1) * len(order)] - begun[_SETTLED * len(order)] for order, begun in zip(orders, starts)
    ) / float(batches)


def shortest_period(costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int]) -> float:
    """Seconds below which no order's period can be, for a chain.

    A stage does all its work in a period, and waits for its first gradient when its memory is full.
    """
    ahead = [
        (limit - standing) // size if size else micro_batches
        for limit, standing, size in zip(limits, sizes.standing_bytes, sizes.activation_bytes)
    ]
    turn, longest = 0.0, 0.0
    for chunk in reversed(range(costs.num_chunks)):
        forward, first = costs.forward_seconds[chunk], costs.input_gradient_seconds[chunk]
        turn += forward  # from the start of its first forward pass to its first gradient
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
    """The order of the shortest period found, of those that alone take about as long as the shortest.

    Arguments and errors are those of :func:`best_schedule`.
    """
    shortest = best_schedule(costs, micro_batches, sizes, limits, start=start, most_actions=most_actions // 2)
    enough = shortest_period(costs, micro_batches, sizes, limits) * _GOOD_ENOUGH
    found: Orders = shortest.schedule.orders
    found_seconds, period = shortest.iteration_seconds, period_seconds(found, micro_batches, costs)
    passes = 3 * costs.num_chunks * micro_batches
    actions = shortest.actions + passes

    def take_if_shorter(seconds: float, orders: Orders) -> None:
        nonlocal found, found_seconds, period, actions
        actions += _BATCHES * passes // 2
        its_period = period_seconds(orders, micro_batches, costs)
        if seconds <= shortest.iteration_seconds * _AS_SHORT and its_period < period:
            found, found_seconds, period = orders, seconds, its_period

    if start is not None:
        take_if_shorter(max(run(start, micro_batches, costs).done), start)
    for policy in POLICIES:
        if period <= enough or actions > most_actions:
            break
        made = greedy(costs, micro_batches, sizes, limits, policy)
        actions += 2 * passes
        if made is None or any(peak > limit for peak, limit in zip(orders_peak_bytes(made, sizes), limits)):
            continue
        ran = run(made, micro_batches, costs)
        seconds = max(ran.done)
        for its_seconds, orders in ((seconds, made), *fuse(made, micro_batches, costs, ran, [seconds])):
            take_if_shorter(its_seconds, orders)
    schedule = Schedule(costs.owners, micro_batches, tuple(map(tuple, found)))
    return FoundSchedule(schedule, found_seconds, shortest.lower_bound_seconds, peak_bytes(schedule, sizes), actions)


def back_to_back_for_equal_costs(num_stages: int, micro_batches: int, memory: float) -> Schedule:
    """The order of the shortest period found of a chain of which nothing has been measured yet.

    Args:
        memory: as in :func:`one_f_one_b_limit`.
    """
    costs, sizes = PassCosts.equal(range(num_stages)), PassBytes.equal(num_stages)
    return best_back_to_back(costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches, memory)).schedule
