"""1F1B: after a warm-up, each stage alternates forward and backward passes (PipeDream, Narayanan et al. 2019).

Stage ``s`` of ``p`` runs ``p - s`` forward passes ahead, and so holds the activations of at most that many
micro-batches. :func:`in_flight` implements this rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.schedule import Schedule

__all__ = ["gradient_first_1f1b", "in_flight", "one_f_one_b"]


def in_flight(stage: int, num_stages: int, micro_batches: int) -> int:
    """Count the micro-batches whose activations ``stage`` holds at its peak under 1F1B."""
    return min(num_stages - stage, micro_batches)


def one_f_one_b(num_stages: int, micro_batches: int) -> Schedule:
    """Build 1F1B with backward passes in one: DeepSpeed's ``TrainSchedule``.

    3 stages, 4 micro-batches, a forward pass takes 1 step and a backward pass 2::

        step    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        stage 0 F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        stage 1 .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
        stage 2 .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .
    """
    return _chain(num_stages, micro_batches, split=False)


def gradient_first_1f1b(num_stages: int, micro_batches: int) -> Schedule:
    """Build 1F1B whose backward passes send the input gradient before they compute weight gradients.

    3 stages, 4 micro-batches, all passes take 1 step::

        step    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15
        stage 0 F0 F1 F2 .  .  I0 W0 F3 I1 W1 .  I2 W2 .  I3 W3
        stage 1 .  F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 .  I3 W3 .
        stage 2 .  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 .  .
    """
    return _chain(num_stages, micro_batches, split=True)


@lru_cache(maxsize=4)
def _chain(num_stages: int, micro_batches: int, *, split: bool) -> Schedule:
    orders = tuple(tuple(_order(stage, num_stages, micro_batches, split)) for stage in range(num_stages))
    return Schedule(tuple(range(num_stages)), micro_batches, orders)


def _order(stage: int, num_stages: int, micro_batches: int, split: bool) -> Iterator[Action]:
    ahead = in_flight(stage, num_stages, micro_batches)
    for micro_batch in range(ahead):
        yield Action(Kind.FORWARD, stage, micro_batch)
    for micro_batch in range(micro_batches):
        if split:
            yield Action(Kind.INPUT_GRADIENT, stage, micro_batch)
            yield Action(Kind.WEIGHT_GRADIENT, stage, micro_batch)
        else:
            yield Action(Kind.BACKWARD, stage, micro_batch)
        if micro_batch + ahead < micro_batches:
            yield Action(Kind.FORWARD, stage, micro_batch + ahead)
