"""Batches that follow each other without a pause.

If stages do not wait for each other at the end of a batch, the first stages start the next batch while the last ones
finish this one. The *period* is the time in seconds from the start of one batch to the start of the next on a stage, in
the steady state. It is shorter than the time of a single batch, because batches overlap. This needs memory: until its
first gradient arrives, a stage can only run forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynmo.schedules.actions import Action
from ds_dynmo.schedules.costs import PassBytes, PassCosts
from ds_dynmo.schedules.order import Orders, run

__all__ = ["period_seconds", "shortest_period"]

_BATCHES = 5  # to simulate
_WARM_UP = 2  # batches before the period is measured


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
