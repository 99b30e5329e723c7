"""ZB-H1 (Qi et al. 2024, "Zero bubble pipeline parallelism", section 3.1 and figure 3)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.one_f_one_b import in_flight
from ds_dynmo.schedules.schedule import Schedule

__all__ = ["zb_h1"]


@lru_cache(maxsize=4)
def zb_h1(num_stages: int, micro_batches: int) -> Schedule:
    """Build 1F1B with deferred weight gradients: on stage ``s`` by ``s`` micro-batches, the last ones at the end.

    Weight gradients fill the time in which 1F1B waits for the last gradients. No stage holds more than the first stage
    does under 1F1B: stage ``s`` runs ``s`` fewer micro-batches ahead, and ``s`` wait for their weight gradients.

    3 stages, 4 micro-batches, all passes take 1 step::

        step    0  1  2  3  4  5  6  7  8  9  10 11 12 13
        stage 0 F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1 .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2 .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    orders = tuple(tuple(_order(stage, num_stages, micro_batches)) for stage in range(num_stages))
    return Schedule(tuple(range(num_stages)), micro_batches, orders)


def _order(stage: int, num_stages: int, micro_batches: int) -> Iterator[Action]:
    ahead, behind = in_flight(stage, num_stages, micro_batches), stage
    for micro_batch in range(ahead):
        yield Action(Kind.FORWARD, stage, micro_batch)
    for micro_batch in range(micro_batches):
        yield Action(Kind.INPUT_GRADIENT, stage, micro_batch)
        if micro_batch >= behind:
            yield Action(Kind.WEIGHT_GRADIENT, stage, micro_batch - behind)
        if micro_batch + ahead < micro_batches:
            yield Action(Kind.FORWARD, stage, micro_batch + ahead)
    for micro_batch in range(max(0, micro_batches - behind), micro_batches):
        yield Action(Kind.WEIGHT_GRADIENT, stage, micro_batch)
