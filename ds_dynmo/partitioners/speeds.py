"""Relative speeds of stages, estimated from layers that were measured on one stage and then on another.

Two different layers on different stages are no evidence, because the layers of a dynamic model differ in load. So
before any layer has moved, all stages are assumed to be equally fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["SpeedEvidence", "relative_speeds"]

_PRIOR = 0.5  # standard deviation of a stage's log speed before there is evidence
_DECAY = 0.85  # weight of evidence relative to the next newer one: clocks and other jobs on a machine change
_SIGNIFICANT = 3.0  # standard errors; a ratio that differs less from 1 counts as 1


class SpeedEvidence(NamedTuple):
    """Layers that moved from one stage to another in one move.

    Attributes:
        log_ratio: the median over the layers of log(seconds on ``destination`` / seconds on ``source``).
        layers: the number of layers.
    """

    source: int
    destination: int
    log_ratio: float
    layers: int


def relative_speeds(evidence: Sequence[SpeedEvidence], num_stages: int, noise: float) -> tuple[float, ...]:
    """Estimate the speed of each stage, with geometric mean 1, by least squares in logs. Newer evidence weighs more.

    Ratios within the noise count as 1. So do speeds without evidence.

    Args:
        evidence: oldest first.
        noise: relative standard deviation of one measurement of one layer.

    >>> [round(speed, 1) for speed in relative_speeds([SpeedEvidence(0, 1, math.log(4), 3)], 2, 0.02)]
    [2.0, 0.5]
    """
    pairs: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for age, (source, destination, log_ratio, layers) in enumerate(reversed(evidence)):
        weight = layers / (2 * noise**2) * _DECAY**age
        if source < destination:
            pairs.setdefault((source, destination), []).append((log_ratio, weight))
        else:
            pairs.setdefault((destination, source), []).append((-log_ratio, weight))
    normal = np.eye(num_stages) / _PRIOR**2
    right = np.zeros(num_stages)
    for (low, high), ratios in pairs.items():
        total = sum(weight for _, weight in ratios)
        ratio = sum(log_ratio * weight for log_ratio, weight in ratios) / total
        if abs(ratio) < _SIGNIFICANT / math.sqrt(total):
            ratio = 0.0
        difference = np.zeros(num_stages)
        difference[[low, high]] = -1.0, 1.0
        normal += total * np.outer(difference, difference)
        right += total * ratio * difference
    slowness = np.linalg.solve(normal, right)
    return tuple(float(speed) for speed in np.exp(slowness.mean() - slowness))
