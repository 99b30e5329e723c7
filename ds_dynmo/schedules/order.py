"""The simulation of a schedule: dependencies between actions, and the start of each.

An action waits for the action before it on its stage, and for its data:

===================================  ==================================================================
action                               needs
===================================  ==================================================================
forward of chunk ``c``               forward of chunk ``c - 1``; nothing for the first chunk
input gradient or backward of ``c``  input gradient or backward of chunk ``c + 1``; for the last chunk, and for frozen
                                     ones, its own forward
weight gradient of ``c``             input gradient of ``c``, which is on the same stage
===================================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.costs import PassCosts

__all__ = ["Orders", "SimulatedBatch", "run"]

Orders = Sequence[Sequence[Action]]

_UNKNOWN = -1.0  # arrival of data whose sender has not run yet


class SimulatedBatch(NamedTuple):
    """The timeline of one batch, as :func:`run` computes it.

    Attributes:
        starts: start of each action in seconds, in the shape of the orders.
        done: per stage, the end of its last action in seconds.
        bursts: pairs of a stage and a number of actions that it ran in a row, sorted so that every action comes after
            those that it waits for.
    """

    starts: list[list[float]]
    done: list[float]
    bursts: list[tuple[int, int]]


def run(orders: Orders, micro_batches: int, costs: PassCosts) -> SimulatedBatch:
    """Simulate one batch of ``orders``, one order per stage.

    A stage starts each action as soon as the one before has ended and its data has arrived. Sends never block and
    receives are posted ahead, so a message arrives ``link_seconds`` after the end of its pass.

    Raises:
        ScheduleError: the actions wait for each other in a circle; the message names them.
    """
    owners, links, last_chunk = costs.owners, costs.link_seconds, costs.num_chunks - 1
    seconds = costs.by_kind
    forward, weight = int(Kind.FORWARD), int(Kind.WEIGHT_GRADIENT)
    num_passes, frozen = micro_batches * costs.num_chunks, costs.frozen_chunks
    inputs = [0.0] * micro_batches + [_UNKNOWN] * (num_passes - micro_batches)
    gradients = [_UNKNOWN] * num_passes
    free_at = [0.0] * len(orders)
    starts: list[list[float]] = [[] for _ in orders]
    awake = list(range(len(orders)))
    asleep = [False] * len(orders)
    bursts: list[tuple[int, int]] = []
    while awake:
        stage = awake.pop()
        order, begun, now = orders[stage], starts[stage], free_at[stage]
        asleep[stage] = False
        before = len(begun)
        for place in range(before, len(order)):
            kind, chunk, micro_batch = order[place]
            slot = chunk * micro_batches + micro_batch
            if kind != weight:
                arrived = inputs[slot] if kind == forward else gradients[slot]
                if arrived < 0.0:
                    asleep[stage] = True
                    break
                if arrived > now:
                    now = arrived
            begun.append(now)
            now += seconds[kind][chunk]
            if kind == weight:
                continue
            if kind != forward:
                if chunk <= frozen:
                    continue
                gradients[slot - micro_batches] = now + links[chunk - 1]
                woken = owners[chunk - 1]
            else:
                if chunk == last_chunk or chunk < frozen:
                    gradients[slot] = now
                if chunk == last_chunk:
                    continue
                inputs[slot + micro_batches] = now + links[chunk]
                woken = owners[chunk + 1]
            if asleep[woken]:
                asleep[woken] = False
                awake.append(woken)
        free_at[stage] = now
        bursts.append((stage, len(begun) - before))
    if any(asleep):
        raise ScheduleError(_circle(orders, [len(begun) for begun in starts], costs))
    return SimulatedBatch(starts, free_at, bursts)


def _circle(orders: Orders, reached: list[int], costs: PassCosts) -> str:
    """Describe a cycle of waiting stages, given the number of actions that each stage could run."""
    stage = next(stage for stage, order in enumerate(orders) if reached[stage] < len(order))
    waits: list[str] = []
    met: list[int] = []
    while stage not in met:
        met.append(stage)
        action = orders[stage][reached[stage]]
        needed = _needed(action, costs.num_chunks)
        waits.append(f"stage {stage} waits at {action} for {needed}")
        stage = costs.owners[needed.chunk]
    return "the order is cyclic: " + "; ".join(waits[met.index(stage) :])


def _needed(action: Action, num_chunks: int) -> Action:
    """Return the action that produces the input of ``action``."""
    kind, chunk, micro_batch = action
    if kind == Kind.FORWARD:
        return Action(kind, chunk - 1, micro_batch)
    if chunk < num_chunks - 1:
        return Action(kind, chunk + 1, micro_batch)
    return Action(Kind.FORWARD, chunk, micro_batch)
