"""Orders of long batches from the order of a short one: in the steady state each stage repeats itself.

The state of a stage at its backward pass of a micro-batch is, per kind of pass, how many passes it is ahead or behind.
If the state is the same ``k`` micro-batches later, the stage has run each kind of pass ``k`` times in between. Then it
can repeat these passes until all added micro-batches are done. All stages repeat from the same micro-batch on. So any
two stages stay as far apart as they were in the short batch, and do not wait longer for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynmo.schedules.actions import Action, Kind, all_passes
from ds_dynmo.schedules.order import Orders

__all__ = ["PERIODS", "repeated"]

PERIODS = (1, 2, 4)  # numbers of micro-batches after which a stage may be in the same state again
_State = tuple[int, ...]
_Passes = Sequence[Sequence[Action]]  # of one kind, by chunk and micro-batch


def repeated(orders: Orders, micro_batches: int, more: int) -> Orders | None:
    """Return orders of ``micro_batches + more`` with the same peak memory; None if no state repeats.

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
            return tuple(
                _repeat_passes(order, *cut, period, more // period, passes) for order, cut in zip(orders, cuts)
            )
    return None


def _states(order: Sequence[Action]) -> list[tuple[int, _State]]:
    """List the places of backward passes of the stage's first chunk in ``order``, and the states before them."""
    reference = min(action.chunk for action in order)
    place_of = {chunk: place for place, chunk in enumerate(sorted({action.chunk for action in order}))}
    counts = [0] * (3 * len(place_of))
    states = []
    for place, (kind, chunk, micro_batch) in enumerate(order):
        if chunk == reference and kind in (Kind.INPUT_GRADIENT, Kind.BACKWARD):
            states.append((place, tuple(count - micro_batch for count in counts)))
        first = 3 * place_of[chunk]
        if kind == Kind.BACKWARD:
            counts[first + Kind.INPUT_GRADIENT] += 1
            counts[first + Kind.WEIGHT_GRADIENT] += 1
        else:
            counts[first + kind] += 1
    return states


def _repeat_passes(
    order: Sequence[Action],
    start: int,
    stop: int,
    period: int,
    times: int,
    passes: Sequence[Sequence[Sequence[Action]]],
) -> tuple[Action, ...]:
    """Repeat ``order[start:stop]`` ``times`` more times, with actions of ``passes``."""

    def later(actions: Sequence[Action], micro_batches: int) -> list[Action]:
        return [passes[kind][chunk][passed + micro_batches] for kind, chunk, passed in actions]

    longer = list(order[:stop])
    for time in range(1, times + 1):
        longer += later(order[start:stop], time * period)
    return tuple(longer + later(order[stop:], times * period))
