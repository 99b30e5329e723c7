"""One order for all messages of two neighbouring stages, the same on both.

Some backends run what two ranks send each other strictly one operation after the other: NCCL runs it on one stream, so
a receive that waits for its message keeps all later operations of the two waiting, and tags tell nothing apart. There
both ranks have to begin the same operations in the same order.

**The order.** Simulate the schedule. Messages come in the order in which their actions end, and of two that end at the
same time the one that others wait for comes first. Two messages in opposite directions of which one would begin while
the other is under way are one *group*, and travel at the same time. They are, if neither is needed for the other: the
receiver of the first makes the second before it needs the first.

**What a stage does.** A stage begins the groups of a neighbour in this order. It begins one as soon as it has made what
it sends in it. It begins one that it only receives at any time before it needs the message, and before it sends what
comes later in the order.

**Why stages never wait in a circle.** Sort all actions of the schedule as their messages: this is a line in which each
action stands behind the one before it on its stage and behind those that make its data. Suppose that stages are stuck.
Take the first action in the line that cannot run. It waits for a message; all actions before it in the line have run.
What its group and all groups before it hold is made by actions that stand before it in the line, so it has been made.
Hence both stages have begun all of these groups, in the same order, and nothing is left for the message to wait for.

Nor does an action wait for a message that it does not need, but for the time that it is under way: what comes before a
message in the order was made before it, or is made by its receiver before it is needed.

**Receives that cannot begin early.** A message whose size the receiver does not know begins when the receiver needs it,
and what the receiver sends behind it waits as long. That is safe too with one chunk per stage. Stages are then a chain,
and each needs what comes from a neighbour in the order in which it was made. Suppose that stages are stuck. Each waits
for a neighbour, so somewhere in the chain two wait for each other. Take the first message in their order that is not
over. Its receiver needs no later one from there yet, so it waits for this one, and would receive it. Its sender waits
for a message that comes later in the order, and so needs it after it has made this one. Hence this message is made and
begun on both sides, and neither waits. With several chunks per stage sizes have to be known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.costs import PassCosts
from ds_dynmo.schedules.order import run
from ds_dynmo.schedules.schedule import Schedule

__all__ = ["Message", "link_orders"]


class Message(NamedTuple):
    """Activations or gradients of one micro-batch, from one stage to another.

    Attributes:
        made_by: the action that makes it.
        needed_by: the action of the other stage that cannot run without it.
    """

    made_by: Action
    needed_by: Action


LinkOrder = tuple[tuple[Message, ...], ...]


def link_orders(schedule: Schedule, costs: PassCosts) -> dict[tuple[int, int], LinkOrder]:
    """Order the messages of every two stages that send each other any, as this module explains.

    Args:
        costs: under which the schedule is simulated. Whatever is frozen, the order has all messages.

    Returns:
        Per two stages, the lower number first, their groups of one message or two.
    """
    places = {
        action: (stage, place) for stage, order in enumerate(schedule.orders) for place, action in enumerate(order)
    }
    line = _line(schedule, replace(costs, frozen_chunks=0))
    found: dict[tuple[int, int], list[list[Message]]] = {}
    for message in sorted(_messages(schedule), key=lambda message: line[message.made_by]):
        source, made = places[message.made_by]
        target, _ = places[message.needed_by]
        groups = found.setdefault((min(source, target), max(source, target)), [])
        if groups and len(groups[-1]) == 1:
            (first,) = groups[-1]
            meets = places[first.made_by][0] == target and places[first.needed_by][1] > made
            link = costs.link_seconds[min(message.made_by.chunk, message.needed_by.chunk)]
            if meets and line[message.made_by][0] - line[first.made_by][0] <= link:
                groups[-1].append(message)
                continue
        groups.append([message])
    return {pair: tuple(map(tuple, groups)) for pair, groups in found.items()}


def _messages(schedule: Schedule) -> Iterator[Message]:
    owners = schedule.owners
    back = {(a.chunk, a.micro_batch): a for order in schedule.orders for a in order if a.kind in _BACKWARD}
    for chunk, (here, there) in enumerate(zip(owners, owners[1:])):
        if here == there:
            continue
        for micro_batch in range(schedule.micro_batches):
            forward = Action(Kind.FORWARD, chunk, micro_batch)
            yield Message(forward, forward._replace(chunk=chunk + 1))
            yield Message(back[chunk + 1, micro_batch], back[chunk, micro_batch])


_BACKWARD = (Kind.INPUT_GRADIENT, Kind.BACKWARD)


def _line(schedule: Schedule, costs: PassCosts) -> dict[Action, tuple[float, int]]:
    """Where each action stands: when it ends, and where that is the same, behind those that it waits for."""
    simulated = run(schedule.orders, schedule.micro_batches, costs)
    line: dict[Action, tuple[float, int]] = {}
    seconds, begun = costs.by_kind, [0] * schedule.num_stages
    for stage, count in simulated.bursts:
        for place in range(begun[stage], begun[stage] + count):
            action = schedule.orders[stage][place]
            line[action] = simulated.starts[stage][place] + seconds[action.kind][action.chunk], len(line)
        begun[stage] += count
    return line
