"""One order for all messages between two neighbouring stages, the same on both.

Some backends run the operations between two ranks strictly one after the other. NCCL runs them on one stream: a receive
that waits for its message blocks all later operations of this pair, and there are no tags. So both ranks have to start
the same operations in the same order.

**The order.** Simulate the schedule. Messages are sorted by the end of the action that produces them; of two that end
at the same time, the one that the other depends on comes first. Two messages in opposite directions form a *group* and
travel at the same time, if one would start while the other is under way and neither needs the other: the receiver of
the first produces the second before it needs the first.

**What a stage does.** A stage starts the groups with a neighbour in this order. It starts a group as soon as it has
produced the message that it sends in it. It starts a group in which it only receives at any time before it needs the
message, and before it sends a message that comes later in the order.

**Why stages never deadlock.** Sort all actions of the schedule in the same way. In this line, each action stands behind
the action before it on its stage and behind those that produce its data. Suppose that stages are stuck. Take the first
action in the line that cannot run. It waits for a message, and all actions before it in the line have run. The messages
of its group and of all earlier groups are produced by actions before it in the line, so they have been produced. Hence
both stages have started all of these groups, in the same order, and nothing blocks the message.

Nor does an action wait for a message that it does not need, except while that message is under way: each earlier
message in the order was produced before, or is produced by the receiver before it needs the later one.

**Receives that cannot be posted early.** If the receiver does not know a message's size, it starts the receive when it
needs the message, and its later sends wait that long. With one chunk per stage this is safe too. The stages then form a
chain, and each needs the messages of a neighbour in the order in which they were produced. Suppose that stages are
stuck. Each waits for a neighbour, so two neighbours somewhere in the chain wait for each other. Take the first
unfinished message in their order. Its receiver needs no later message of this neighbour yet, so it waits for this one
and would receive it. Its sender waits for a message that comes later in the order, so it has already produced this one.
Hence this message is produced, and started on both sides: neither waits. With several chunks per stage, sizes have to
be known: :mod:`ds_dynmo.schedules.first_batch` announces them.
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
        made_by: the action that produces it.
        needed_by: the action of the other stage that takes it as input.
    """

    made_by: Action
    needed_by: Action


LinkOrder = tuple[tuple[Message, ...], ...]


def link_orders(schedule: Schedule, costs: PassCosts) -> dict[tuple[int, int], LinkOrder]:
    """Order the messages of every pair of stages that communicate, as this module explains.

    Args:
        costs: of the simulation. The order contains the messages of frozen chunks too.

    Returns:
        Per pair of stages, the lower number first, its groups of one message or two.
    """
    places = {
        action: (stage, place) for stage, order in enumerate(schedule.orders) for place, action in enumerate(order)
    }
    line = _line(schedule, replace(costs, frozen_chunks=0))
    links: dict[tuple[int, int], list[list[Message]]] = {}
    for message in sorted(_messages(schedule), key=lambda message: line[message.made_by]):
        source, made = places[message.made_by]
        target, _ = places[message.needed_by]
        groups = links.setdefault((min(source, target), max(source, target)), [])
        if groups and len(groups[-1]) == 1:
            (first,) = groups[-1]
            meets = places[first.made_by][0] == target and places[first.needed_by][1] > made
            link = costs.link_seconds[min(message.made_by.chunk, message.needed_by.chunk)]
            if meets and line[message.made_by][0] - line[first.made_by][0] <= link:
                groups[-1].append(message)
                continue
        groups.append([message])
    return {pair: tuple(map(tuple, groups)) for pair, groups in links.items()}


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
    """Map each action to its sort key: its end in seconds, then its place behind the actions that it waits for."""
    simulated = run(schedule.orders, schedule.micro_batches, costs)
    line: dict[Action, tuple[float, int]] = {}
    seconds, begun = costs.by_kind, [0] * schedule.num_stages
    for stage, count in simulated.bursts:
        for place in range(begun[stage], begun[stage] + count):
            action = schedule.orders[stage][place]
            line[action] = simulated.starts[stage][place] + seconds[action.kind][action.chunk], len(line)
        begun[stage] += count
    return line
