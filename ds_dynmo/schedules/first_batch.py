"""The batch in which stages do not know yet how large messages are.

A receive can be posted early only if the size of its message is known. So sizes are announced in front of a batch: the
first micro-batch passes forward through all chunks of a stage before the stage does anything else. Its messages are the
first between any two stages, and each is received when it is needed. A gradient is as large as its activations.

**Why nothing hangs.** In front, a stage waits only for the forward pass of the chunk before, which is in front of its
stage too, behind forward passes of earlier chunks alone. So the chunks pass one after the other. All messages of the
fronts come before all others of the same two stages: a stage sends no other before the end of its front, and by then it
has sent and received all of these. What follows is the schedule without these passes, and every receive in it can be
posted early (:mod:`ds_dynmo.schedules.link_order`).

**Memory.** No stage holds more than under the schedule itself: a stage runs no backward pass before the first
micro-batch has passed all chunks (but those of frozen chunks, which hold nothing), so when it holds most it holds what
is moved to the front.
"""

from __future__ import annotations

from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.schedule import Schedule

__all__ = ["first_batch"]


def first_batch(schedule: Schedule) -> Schedule:
    """Return the schedule with the forward passes of micro-batch 0 in front of each stage, in the order of the chunks.

    >>> print(first_batch(Schedule.of_lines(["F0@0 F1@0 F0@1 F1@1 B0@1 B1@1 B0@0 B1@0"])))
    stage 0: F0@0 F0@1 F1@0 F1@1 B0@1 B1@1 B0@0 B1@0
    """
    orders = (
        (*sorted(filter(_in_front, order)), *(action for action in order if not _in_front(action)))
        for order in schedule.orders
    )
    return Schedule(schedule.owners, schedule.micro_batches, tuple(orders))


def _in_front(action: Action) -> bool:
    return action.kind == Kind.FORWARD and action.micro_batch == 0
