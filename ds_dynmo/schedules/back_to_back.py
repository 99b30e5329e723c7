"""Batches that follow each other without a pause.

If stages do not wait for each other at the end of a batch, the first stages start the next batch while the last ones
finish this one. The *period* is the time in seconds from the start of one batch to the start of the next on a stage, in
the steady state. It is shorter than the time of a single batch, because batches overlap. This needs memory: until its
first gradient arrives, a stage can only run forward passes.
"""

from __future__ import annotations

import math
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
    """Return a lower bound of the period of any order, in seconds.

    In each period a stage runs all its passes. It also waits for its first gradient, which comes to its last chunk, if
    its memory is full before.
    """
    forward, frozen = costs.forward_seconds, costs.frozen_chunks
    whole = [min(b, i + w) for b, i, w in zip(costs.backward_seconds, *costs.by_kind[1:3])]
    until = [min(first, both) for first, both in zip(costs.input_gradient_seconds, whole)]
    links = (*costs.link_seconds, 0.0)
    longest = 0.0
    for stage, limit in enumerate(limits):
        mine = costs.chunks_of(stage)
        trained = [chunk for chunk in mine if chunk >= frozen]
        turn = sum(forward[mine[0] :]) + sum(links[mine[0] :]) + sum(until[mine[-1] + 1 :]) + sum(links[mine[-1] :])
        room = limit - sum(sizes.standing_bytes[chunk] for chunk in mine)
        per_byte = max((_over(forward[chunk], sizes.activation_bytes[chunk]) for chunk in trained), default=0.0)
        ahead = sum(forward[chunk] for chunk in mine) * micro_batches
        if trained and per_byte < math.inf:
            in_memory = room * per_byte + sum(forward[chunk] for chunk in mine if chunk < frozen) * micro_batches
            ahead = min(ahead, in_memory)
        waits = max(0.0, turn - ahead) if trained else 0.0
        longest = max(longest, waits + micro_batches * sum(forward[chunk] + whole[chunk] for chunk in mine))
    return longest


def _over(seconds: float, size: int) -> float:
    return seconds / size if size else math.inf
