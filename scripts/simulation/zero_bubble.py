"""Simulate an iteration in the order that a decision of the engine would find, for a chain or a V."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ds_dynmo.partitioners import LayerPasses, PassModel
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import FoundSchedule, Kind, PassCosts, Schedule
from ds_dynmo.schedules.order import run

WEIGHT_SHARE, SPLIT_PRICE = 0.4, 1.05  # of transformer blocks: weights in a backward pass; both parts over one pass

Floats = npt.NDArray[np.float64]


class Orders:
    """The order in force. As in the engine, another one is searched where it has become worse by 1%."""

    def __init__(self) -> None:
        self._latest: FoundSchedule | None = None

    def known_by(self, model: PassModel) -> PassModel:
        """Return a model that knows the order in force."""
        if self._latest is None:
            return model
        return replace(model, in_force=self._latest.schedule, in_force_over_bound=self._latest.over_bound)

    def seconds(self, model: PassModel, placement: Placement, forward: Floats, backward: Floats) -> float:
        """Simulate an iteration of all replicas, which end together.

        Args:
            model: of each layer on its slowest replica, from which the order is found.
            forward, backward: seconds of layers, ``[replicas, layers]``.
        """
        found = self.known_by(model).shortest(placement)
        assert found is not None  # 1F1B's memory is enough
        self._latest = found
        forward, backward = np.split(np.unique(np.concatenate([forward, backward], axis=1), axis=0), 2, axis=1)
        if len(forward) == 1:
            return found.iteration_seconds
        parts, starts = (forward, *parts_of_backward(backward), backward), placement.boundaries[:-1]
        seconds = [np.add.reduceat(part, starts, axis=1).T for part in parts]
        return float(iterations_seconds(found.schedule, model.costs(placement), seconds).max())


def pass_model(
    forward: Floats, backward: Floats, stages: int, micro_batches: int, link_seconds: float = 0.0
) -> PassModel:
    """Make the engine's model of passes, in which each layer saves as much for its backward pass."""
    first, second = parts_of_backward(backward)
    seconds = [tuple(part.tolist()) for part in (forward, first, second, backward)]
    none, same = (0,) * len(forward), (1,) * len(forward)
    frozen = int(np.argmax(backward > 0)) if backward.any() else len(backward)
    layers = LayerPasses(seconds[0], seconds[1], seconds[2], seconds[3], none, same, none, same, frozen)
    return PassModel(layers, micro_batches, (1.0,) * stages, link_seconds)


def parts_of_backward(backward: Floats) -> tuple[Floats, Floats]:
    return SPLIT_PRICE * (1 - WEIGHT_SHARE) * backward, SPLIT_PRICE * WEIGHT_SHARE * backward


def iterations_seconds(schedule: Schedule, costs: PassCosts, seconds: list[Floats]) -> Floats:
    """Simulate one order on many replicas at once: what ``replay`` does for one.

    Args:
        costs: by which the order can be simulated; links and frozen chunks are the same on all replicas.
        seconds: by ``Kind``, ``[num_chunks, replicas]``.
    """
    bursts = run(schedule.orders, schedule.micro_batches, costs).bursts
    last, frozen, links = costs.num_chunks - 1, costs.frozen_chunks, costs.link_seconds
    free = np.zeros((costs.num_stages, seconds[0].shape[1]))
    inputs, gradients = np.zeros((2, costs.num_chunks, schedule.micro_batches, seconds[0].shape[1]))
    reached = [0] * costs.num_stages
    for stage, count in bursts:
        now, begin = free[stage], reached[stage]
        for kind, chunk, micro_batch in schedule.orders[stage][begin : begin + count]:
            if kind != Kind.WEIGHT_GRADIENT:
                arrived = inputs if kind == Kind.FORWARD else gradients
                now = np.maximum(now, arrived[chunk, micro_batch])
            now = now + seconds[kind][chunk]
            if kind == Kind.FORWARD:
                if chunk == last or chunk < frozen:
                    gradients[chunk, micro_batch] = now
                if chunk < last:
                    inputs[chunk + 1, micro_batch] = now + links[chunk]
            elif kind != Kind.WEIGHT_GRADIENT and chunk > frozen:
                gradients[chunk - 1, micro_batch] = now + links[chunk - 1]
        free[stage], reached[stage] = now, begin + count
    slowest: Floats = free.max(axis=0)
    return slowest
