"""Merging the two parts of a backward pass again where they fill no gap: a split costs memory, and time (some %)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_dynmo.schedules.actions import Action, Kind, all_passes
from ds_dynmo.schedules.costs import PassCosts
from ds_dynmo.schedules.order import Orders, SimulatedBatch

__all__ = ["FusedOrders", "fuse"]

_ROUNDING = 1e-9  # relative
_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _BACKWARD = map(int, Kind)


class FusedOrders(NamedTuple):
    """Orders with fewer splits.

    Attributes:
        seconds: of an iteration.
    """

    seconds: float
    orders: list[list[Action]]


def fuse(orders: Orders, micro_batches: int, costs: PassCosts, simulated: SimulatedBatch) -> FusedOrders:
    """Merge each split backward pass that meets its deadlines in one part.

    Deadlines are the latest starts with which the given orders take no longer. A pass is fused if this makes neither
    the stage that waits for its gradient nor the next action of its stage late, and if no weight gradient of an earlier
    micro-batch is pending.

    Args:
        simulated: the orders under these costs.
    """
    target_seconds = max(simulated.done) * (1 + _ROUNDING)
    latest, gradients_due = _deadlines(orders, micro_batches, costs, simulated)
    forward, input_gradient, weight_gradient, backward = costs.by_kind
    links, last_chunk, frozen = costs.link_seconds, costs.num_chunks - 1, costs.frozen_chunks
    in_one = all_passes(Kind.BACKWARD, costs.num_chunks, micro_batches)
    inputs = [0.0] * (micro_batches * costs.num_chunks)  # arrival, in seconds
    gradients = list(inputs)  # arrival; 0.0 for those that no stage sends: of the loss and of frozen chunks
    free_at = [0.0] * len(orders)
    weights_done = [0] * costs.num_chunks
    reached = [0] * len(orders)
    fused: list[list[Action]] = [[] for _ in orders]
    for stage, count in simulated.bursts:
        order, fused_order, now = orders[stage], fused[stage], free_at[stage]
        start = reached[stage]
        stop = reached[stage] = start + count
        for place in range(start, stop):
            kind, chunk, micro_batch = action = order[place]
            if kind == _WEIGHT_GRADIENT:
                if micro_batch < weights_done[chunk]:
                    continue  # fused
                weights_done[chunk] = micro_batch + 1
                now += weight_gradient[chunk]
            elif kind == _FORWARD:
                slot = chunk * micro_batches + micro_batch
                now = max(now, inputs[slot]) + forward[chunk]
                if chunk < last_chunk:
                    inputs[slot + micro_batches] = now + links[chunk]
            else:
                slot = chunk * micro_batches + micro_batch
                now = max(now, gradients[slot])
                in_one_part = kind == _BACKWARD
                if not in_one_part and weights_done[chunk] == micro_batch:
                    left = target_seconds - now - backward[chunk]
                    if left >= gradients_due[slot]:
                        following = _following(order, place, weights_done)
                        in_one_part = left >= (latest[stage][following] if following < len(order) else 0.0)
                if in_one_part:
                    action = in_one[chunk][micro_batch]
                    weights_done[chunk] = micro_batch + 1
                    now += backward[chunk]
                else:
                    now += input_gradient[chunk]
                if chunk > frozen:
                    gradients[slot - micro_batches] = now + links[chunk - 1]
            fused_order.append(action)
        free_at[stage] = now
    return FusedOrders(max(free_at), fused)


def _following(order: Sequence[Action], place: int, weights_done: Sequence[int]) -> int:
    """Return the place of the next action once the backward pass at ``place`` is fused; ``len(order)`` if none."""
    _, chunk, micro_batch = order[place]
    for following in range(place + 1, len(order)):
        kind, other, passed = order[following]
        if kind != _WEIGHT_GRADIENT or passed >= (micro_batch + 1 if other == chunk else weights_done[other]):
            return following
    return len(order)


def _deadlines(
    orders: Orders, micro_batches: int, costs: PassCosts, simulated: SimulatedBatch
) -> tuple[list[list[float]], list[float]]:
    """Compute deadlines, in seconds before the end of the iteration.

    Returns:
        The latest start of each action, in the shape of ``orders``; the latest departure of each gradient, by chunk and
        micro-batch.
    """
    seconds, links, last_chunk = costs.by_kind, costs.link_seconds, costs.num_chunks - 1
    frozen = costs.frozen_chunks
    latest = [[0.0] * len(order) for order in orders]
    next_due = [0.0] * len(orders)
    outputs_due = [0.0] * (micro_batches * costs.num_chunks)
    gradients_due = list(outputs_due)
    reached = [len(order) for order in orders]
    for stage, count in reversed(simulated.bursts):
        order, starts, due = orders[stage], latest[stage], next_due[stage]
        stop = reached[stage]
        start = reached[stage] = stop - count
        for place in range(stop - 1, start - 1, -1):
            kind, chunk, micro_batch = order[place]
            slot = chunk * micro_batches + micro_batch
            if kind == _FORWARD:
                due = max(due, outputs_due[slot]) + seconds[kind][chunk]
                if chunk > 0:
                    outputs_due[slot - micro_batches] = due + links[chunk - 1]
            elif kind == _WEIGHT_GRADIENT:
                due += seconds[kind][chunk]
            else:
                due = max(due, gradients_due[slot]) + seconds[kind][chunk]
                if frozen <= chunk < last_chunk:
                    gradients_due[slot + micro_batches] = due + links[chunk]
            starts[place] = due
        next_due[stage] = due
    return latest, gradients_due
