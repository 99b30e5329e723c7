"""Longer batches from a shorter one's order: between filling and draining, each stage repeats itself.

A stage's state, when a micro-batch's gradient is its turn, is how many passes of each kind it is ahead or behind. Where
it is in the same state ``k`` micro-batches later, it ran each kind of pass ``k`` times in between, and may run them as
often again as there are micro-batches to add. All stages do so at the same micro-batch. So any two of them are as far
apart at each micro-batch as they were at one of the shorter batch, and wait for each other no more than they did.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynmo.schedules.actions import Action, Kind, all_passes
from ds_dynmo.schedules.order import Orders

__all__ = ["PERIODS", "repeated"]

PERIODS = (1, 2, 4)  # micro-batches after which a stage is looked for in the same state
_State = tuple[int, ...]
_Passes = Sequence[Sequence[Action]]  # of one kind, by chunk and micro-batch


def repeated(orders: Orders, micro_batches: int, more: int) -> Orders | None:
    """The orders of ``micro_batches + more``, which hold as much memory at their peak; None where nothing repeats.

    Args:
        more: micro-batches to add, a multiple of the largest of :data:`PERIODS`.
    """
    states = [_states(order) for order in orders]
    for period in PERIODS:
        alike = [
            first
            for first in range(micro_batches - period)
            if all(stage[first][1] == stage[first + period][1] for stage in states)
        ]
        if alike:
            first = alike[len(alike) // 2]
            cuts = ((stage[first][0], stage[first + period][0]) for stage in states)
            num_chunks = 1 + max(action.chunk for order in orders for action in order)
            passes = [all_passes(kind, num_chunks, micro_batches + more) for kind in Kind]
            return tuple(_stretched(order, *cut, period, more // period, passes) for order, cut in zip(orders, cuts))
    return None


def _states(order: Sequence[Action]) -> list[tuple[int, _State]]:
    """Where each backward pass of the stage's first chunk stands in its order, and the state before it."""
    reference = min(action.chunk for action in order)
    place_of = {chunk: place for place, chunk in enumerate(sorted({action.chunk for action in order}))}
    counts = [0] * (3 * len(place_of))
    found = []
    for place, (kind, chunk, micro_batch) in enumerate(order):
        if chunk == reference and kind in (Kind.INPUT_GRADIENT, Kind.BACKWARD):
            found.append((place, tuple(count - micro_batch for count in counts)))
        first = 3 * place_of[chunk]
        if kind == Kind.BACKWARD:
            counts[first + Kind.INPUT_GRADIENT] += 1
            counts[first + Kind.WEIGHT_GRADIENT] += 1
        else:
            counts[first + kind] += 1
    return found


def _stretched(
    order: Sequence[Action],
    start: int,
    stop: int,
    period: int,
    times: int,
    passes: Sequence[Sequence[Sequence[Action]]],
) -> tuple[Action, ...]:
    """``order`` with what is between ``start`` and ``stop`` so many times more; its actions are from ``passes``."""

    def later(actions: Sequence[Action], micro_batches: int) -> list[Action]:
        return [passes[kind][chunk][passed + micro_batches] for kind, chunk, passed in actions]

    longer = list(order[:stop])
    for time in range(1, times + 1):
        longer += later(order[start:stop], time * period)
    return tuple(longer + later(order[stop:], times * period))
