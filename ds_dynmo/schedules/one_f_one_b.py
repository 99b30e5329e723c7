"""1F1B: after a warm-up, each stage alternates forward and backward passes (PipeDream, Narayanan et al. 2019).

Stage ``s`` of ``p`` runs ``p - s`` forward passes ahead, and so holds the activations of at most that many
micro-batches. :func:`in_flight` implements this rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from ds_dynmo.placement import Shape, owners_of
from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.schedule import Schedule

__all__ = ["in_flight", "interleaved_1f1b", "one_f_one_b"]


def in_flight(stage: int, num_stages: int, micro_batches: int) -> int:
    """Count the micro-batches whose activations ``stage`` holds at its peak under 1F1B."""
    return min(num_stages - stage, micro_batches)


@lru_cache(maxsize=4)
def one_f_one_b(num_stages: int, micro_batches: int) -> Schedule:
    """Build 1F1B with backward passes in one: DeepSpeed's ``TrainSchedule``.

    3 stages, 4 micro-batches, a forward pass takes 1 step and a backward pass 2::

        step    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        stage 0 F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        stage 1 .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
        stage 2 .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .
    """
    ahead = [in_flight(stage, num_stages, micro_batches) for stage in range(num_stages)]
    return _alternating("chain", ahead, [range(micro_batches)])


@lru_cache(maxsize=4)
def interleaved_1f1b(num_stages: int, micro_batches: int) -> Schedule:
    """Build 1F1B on a loop: Megatron-LM's interleaved schedule with two chunks per stage (Narayanan et al. 2021).

    Micro-batches run in groups: all of a group through the first chunk of a stage, then all through its second one.
    Groups are at least as large as there are stages, and the first ones at most one larger than the others: so the
    number of micro-batches need not be a multiple of the number of stages, as in Megatron-LM.

    >>> print(interleaved_1f1b(2, 4))
    stage 0: F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0
    stage 1: F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1
    """
    count = max(1, micro_batches // num_stages)
    size, larger = divmod(micro_batches, count)
    starts = [group * size + min(group, larger) for group in range(count + 1)]
    groups = [range(start, stop) for start, stop in zip(starts, starts[1:])]
    ahead = [2 * (num_stages - 1 - stage) + len(groups[0]) + 1 for stage in range(num_stages)]
    return _alternating("loop", ahead, groups)


def _alternating(shape: Shape, ahead: Sequence[int], groups: Sequence[range]) -> Schedule:
    """Build the schedule whose stages alternate, after ``ahead`` forward passes each."""
    owners = owners_of(shape, len(ahead))
    orders = []
    for stage, count in enumerate(ahead):
        chunks = [chunk for chunk, owner in enumerate(owners) if owner == stage]
        forwards = list(_passes(Kind.FORWARD, chunks, groups))
        order = forwards[:count]
        for place, backward in enumerate(_passes(Kind.BACKWARD, chunks[::-1], groups), count):
            order += [backward, *forwards[place : place + 1]]
        orders.append(tuple(order))
    return Schedule(owners, groups[-1].stop, tuple(orders))


def _passes(kind: Kind, chunks: Sequence[int], groups: Sequence[range]) -> Iterator[Action]:
    """Generate the passes of a stage, group by group, and within a group chunk by chunk."""
    return (Action(kind, chunk, micro_batch) for group in groups for chunk in chunks for micro_batch in group)
