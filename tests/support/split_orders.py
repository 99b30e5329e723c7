"""Schedules whose backward passes are all split, in fixed orders."""

from __future__ import annotations

from collections.abc import Iterator

from ds_dynmo.schedules import Action, Kind, Schedule, in_flight


def gradient_first_1f1b(num_stages: int, micro_batches: int) -> Schedule:
    """Build 1F1B that sends the input gradient before it computes weight gradients."""
    return _split(micro_batches, [0] * num_stages)


def zb_h1(num_stages: int, micro_batches: int) -> Schedule:
    """Build ZB-H1 (Qi et al. 2024, figure 3): stage ``s`` defers weight gradients by ``s`` micro-batches."""
    return _split(micro_batches, list(range(num_stages)))


def _split(micro_batches: int, behind: list[int]) -> Schedule:
    orders = (_order(stage, len(behind), micro_batches, behind[stage]) for stage in range(len(behind)))
    return Schedule(tuple(range(len(behind))), micro_batches, tuple(map(tuple, orders)))


def _order(stage: int, num_stages: int, micro_batches: int, behind: int) -> Iterator[Action]:
    ahead = in_flight(stage, num_stages, micro_batches)
    for number in range(-ahead, micro_batches + behind):
        if 0 <= number < micro_batches:
            yield Action(Kind.INPUT_GRADIENT, stage, number)
        if 0 <= number - behind < micro_batches:
            yield Action(Kind.WEIGHT_GRADIENT, stage, number - behind)
        if number + ahead < micro_batches:
            yield Action(Kind.FORWARD, stage, number + ahead)
