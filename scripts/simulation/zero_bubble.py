"""Simulate an iteration under zero bubble, in the order that a decision of the engine would find."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ds_dynmo.schedules import PassBytes, PassCosts, Schedule, best_schedule, one_f_one_b_limit, replay

WEIGHT_SHARE, SPLIT_PRICE = 0.4, 1.05  # of transformer blocks: weights in a backward pass; both parts over one pass

Floats = npt.NDArray[np.float64]


def zero_bubble_seconds(
    known: tuple[Sequence[float], Sequence[float]],
    forward: Floats,
    backward: Floats,
    layers: Sequence[int],
    micro_batches: int,
    link_seconds: float,
) -> float:
    """Simulate an iteration of all replicas, which end together.

    Args:
        known: forward and backward seconds of each stage, from which the order is found.
        forward, backward: what the stages take, ``[stages, replicas]``.
        layers: of each stage; each layer saves as much for its backward pass.
    """
    frozen = next((stage for stage, seconds in enumerate(known[1]) if seconds), len(layers))
    costs = _costs(*known, link_seconds, frozen)
    order = _order(costs, micro_batches, tuple(layers))
    replicas = np.unique(np.concatenate([forward, backward]), axis=1).T.tolist()
    stages = len(layers)
    return max(
        replay(order, _costs(replica[:stages], replica[stages:], link_seconds, frozen)).iteration_seconds
        for replica in replicas
    )


def _costs(forward: Sequence[float], backward: Sequence[float], link_seconds: float, frozen: int) -> PassCosts:
    first = [SPLIT_PRICE * (1 - WEIGHT_SHARE) * seconds for seconds in backward]
    second = [SPLIT_PRICE * WEIGHT_SHARE * seconds for seconds in backward]
    return PassCosts.chain(forward, first, second, backward, link_seconds, frozen_chunks=frozen)


@lru_cache(maxsize=4096)
def _order(costs: PassCosts, micro_batches: int, layers: tuple[int, ...]) -> Schedule:
    """Return the shortest order that is found with 1F1B's memory."""
    sizes = PassBytes(layers, layers, (0,) * len(layers))
    return best_schedule(costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches)).schedule
