"""The load of a stage, and measures of a partition from it.

A stage's load is the correctly rounded sum of its layers' costs (``math.fsum``). So it does not depend on the order of
summation, and it never falls when a layer is added. Every balancer of this package compares loads that way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_dynmo.partitioners.checks import check_costs, check_speeds
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import simulate

__all__ = [
    "bottleneck",
    "bubble_ratio",
    "imbalance",
    "imbalance_of_loads",
    "loads",
    "loads_of",
    "potential",
    "prefix_sums",
    "sums_of_many",
    "sums_of_stages",
]

Numbers = npt.NDArray[Any]
Partitions = npt.NDArray[np.int64]  # [num_stages + 1, how many]: a column each


def prefix_sums(values: Sequence[float]) -> Numbers:
    """Sum the first 0, 1, 2, ... of ``values``; ints exactly."""
    return np.concatenate([[0], np.cumsum(values)])


def sums_of_many(values: Sequence[float], partitions: Partitions) -> Numbers:
    """Sum values of layers per stage under many partitions at once: :func:`loads`, except for rounding.

    Returns:
        ``[num_stages, how many]``.
    """
    return np.diff(prefix_sums(values)[partitions], axis=0)


def sums_of_stages(values: Numbers, owners: Sequence[int]) -> Numbers:
    """Sum values of chunks, ``[num_chunks, how many]``, per stage that holds them, ``[num_stages, how many]``."""
    sums = np.zeros((max(owners) + 1, *values.shape[1:]), dtype=values.dtype)
    np.add.at(sums, list(owners), values)
    return sums


def loads(costs: Sequence[float], partition: Sequence[int], speeds: Sequence[float] | None = None) -> list[float]:
    """Compute the load of each stage.

    Args:
        speeds: per stage; the load of a stage is the costs of its layers over its speed; None: all are equal.

    >>> loads([4, 9, 7, 5], [0, 1, 2, 4])
    [4.0, 9.0, 12.0]

    Raises:
        PartitionError: invalid costs or speeds, or an invalid partition of these layers.
    """
    return loads_of(costs, Placement.chain(partition, num_layers=len(costs)), speeds)


def loads_of(costs: Sequence[float], placement: Placement, speeds: Sequence[float] | None = None) -> list[float]:
    """Compute the load of each stage under a placement: :func:`loads` where stages may own several chunks.

    >>> loads_of([4, 9, 7, 5], Placement.v([0, 1, 2, 3, 4]))
    [9.0, 16.0]
    """
    checked = check_costs(costs)
    sums = [math.fsum(checked[layer] for layer in placement.layers_of(stage)) for stage in placement.stages]
    return sums if speeds is None else [load / speed for load, speed in zip(sums, check_speeds(speeds, len(sums)))]


def bottleneck(costs: Sequence[float], partition: Sequence[int]) -> float:
    """Compute the largest load of a stage, which bounds the pipeline's throughput.

    >>> bottleneck([4, 9, 7, 5], [0, 1, 2, 4])
    12.0
    """
    return max(loads(costs, partition))


def imbalance(costs: Sequence[float], partition: Sequence[int]) -> float:
    """Compute the paper's equation 2: (largest - smallest load) / mean load; 0 if all costs are 0.

    >>> imbalance([1, 1, 4], [0, 2, 3])
    0.6666666666666666
    """
    return imbalance_of_loads(loads(costs, partition))


def imbalance_of_loads(stage_loads: Sequence[float]) -> float:
    """Compute :func:`imbalance` from the loads of the stages.

    >>> imbalance_of_loads([2.0, 4.0])
    0.6666666666666666
    """
    mean = math.fsum(stage_loads) / len(stage_loads)
    return (max(stage_loads) - min(stage_loads)) / mean if mean else 0.0


def potential(stage_loads: Sequence[float]) -> float:
    """Compute the paper's phi (proof of Lemma 2): the sum of ``|x_u - x_v|`` over all pairs of stages, each once.

    >>> potential([1.0, 4.0, 6.0])
    10.0
    """
    ordered = sorted(stage_loads)
    last = len(ordered) - 1
    return math.fsum((2 * rank - last) * load for rank, load in enumerate(ordered))


def bubble_ratio(
    forward: Sequence[float],
    backward: Sequence[float],
    partition: Sequence[int],
    micro_batches: int,
    link_seconds: float = 0.0,
) -> float:
    """Compute the fraction of ``num_stages`` x iteration in which stages are idle, by :func:`simulate`.

    Args:
        forward, backward: per layer, seconds per micro-batch.
        partition: boundaries.
        micro_batches: per iteration.
        link_seconds: of a message between neighbours.

    >>> bubble_ratio([1, 1], [2, 2], [0, 1, 2], micro_batches=2)
    0.3333333333333333
    """
    return simulate(loads(forward, partition), loads(backward, partition), micro_batches, link_seconds).bubble_ratio
