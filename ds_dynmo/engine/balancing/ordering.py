"""The pipeline schedule of a placement: the shortest order of passes by what was measured of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynmo.config.dynmo import ScheduleConfig
from ds_dynmo.engine.balancing.policy import DecisionInput
from ds_dynmo.errors import ScheduleError
from ds_dynmo.plan import LayerCost
from ds_dynmo.schedules import (
    FoundSchedule,
    PassBytes,
    PassCosts,
    best_schedule,
    one_f_one_b_limit,
)


def shortest_schedule(
    given: DecisionInput, config: ScheduleConfig, checkpoint_interval: int, limit_bytes: int | None
) -> FoundSchedule | None:
    """Find the shortest order of passes for the placement in force.

    Args:
        checkpoint_interval: layers of a segment that is recomputed; 0: none are.
        limit_bytes: of a rank, its layers included; None: no limit.

    Returns:
        None: DeepSpeed's 1F1B, where that is as short and ``config`` leaves the choice, or where a stage cannot hold
        what one micro-batch of another needs.
    """
    sizes = pass_bytes(given, checkpoint_interval)
    micro_batches = given.profile.micro_batches
    limits = one_f_one_b_limit(sizes, micro_batches, config.memory)
    if limit_bytes is not None:
        left = (limit_bytes - sum(cost.static_bytes for cost in costs) for costs in _layers_of_chunks(given))
        limits = tuple(map(min, limits, left))
    try:
        found = best_schedule(pass_costs(given), micro_batches, sizes, limits)
    except ScheduleError:
        return None
    as_it_is = given.pipeline.iteration_seconds(given.partition)
    return None if config.kind == "auto" and found.iteration_seconds >= as_it_is else found


def pass_costs(given: DecisionInput) -> PassCosts:
    """Add up the seconds of passes per chunk.

    A layer of which no backward pass ran in two parts has all of it in the first.
    """
    placement, speeds = given.placement, given.speeds or (1.0,) * given.placement.num_stages
    scale = [
        speeds[given.profile.placement.stage_of(layer)] / speeds[placement.stage_of(layer)]
        for layer in range(len(given.profile.layers))
    ]
    layers = given.profile.layers
    frozen = next((index for index, cost in enumerate(layers) if cost.trainable_parameters), 0)
    forward, first, second, backward = [], [], [], []
    for chunk in map(placement.chunk, range(placement.num_chunks)):
        here = [(layers[index], scale[index]) for index in chunk]
        goes_back = chunk.stop > frozen
        forward.append(sum(cost.forward_seconds * by for cost, by in here))
        first.append(goes_back * sum(_first_part(cost) * by for cost, by in here))
        second.append(goes_back * sum(cost.weight_gradient_seconds * by for cost, by in here))
        backward.append(goes_back * sum(cost.backward_seconds * by for cost, by in here))
    return PassCosts(
        placement.owners,
        tuple(forward),
        tuple(first),
        tuple(second),
        tuple(backward),
        frozen_chunks=sum(placement.chunk(number).stop <= frozen for number in range(placement.num_chunks)),
    )


def pass_bytes(given: DecisionInput, checkpoint_interval: int) -> PassBytes:
    """Add up what passes hold per chunk."""
    activations, held, recomputed = [], [], []
    for costs in _layers_of_chunks(given):
        heads = range(0, len(costs), checkpoint_interval) if checkpoint_interval else ()
        whole = sum(cost.activation_bytes for cost in costs)
        activations.append(sum(costs[head].input_bytes for head in heads) if checkpoint_interval else whole)
        held.append(sum(cost.deferred_bytes for cost in costs))
        segments = (sum(cost.activation_bytes for cost in costs[head : head + checkpoint_interval]) for head in heads)
        recomputed.append(max(segments, default=0))
    return PassBytes(tuple(activations), tuple(held), tuple(recomputed))


def _first_part(cost: LayerCost) -> float:
    measured = cost.input_gradient_seconds + cost.weight_gradient_seconds
    return cost.input_gradient_seconds if measured else cost.backward_seconds


def _layers_of_chunks(given: DecisionInput) -> list[Sequence[LayerCost]]:
    chunks = map(given.placement.chunk, range(given.placement.num_chunks))
    return [[given.profile.layers[index] for index in chunk] for chunk in chunks]
