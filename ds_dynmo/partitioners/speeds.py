"""Relative speeds of stages, estimated from layers that were measured on one stage and then on another.

Two different layers on different stages are no evidence, because the layers of a dynamic model differ in load. So
before any layer has moved, all stages are assumed to be equally fast.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ds_dynmo.partitioners.portable import exp
from ds_dynmo.placement import Placement

__all__ = ["SpeedEvidence", "evidence_of", "relative_speeds"]

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


def evidence_of(logs: Mapping[int, float], old: Placement, new: Placement) -> list[SpeedEvidence]:
    """Return what a move from ``old`` to ``new`` shows.

    Args:
        logs: per comparable layer, log(seconds after the move / seconds before).
    """
    ways: dict[tuple[int, int], list[float]] = {}
    for layer, ratio in logs.items():
        source, destination = old.stage_of(layer), new.stage_of(layer)
        if source != destination:
            ways.setdefault((source, destination), []).append(ratio)
    return [SpeedEvidence(*way, statistics.median(ratios), len(ratios)) for way, ratios in sorted(ways.items())]


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
    newness = 1.0
    for source, destination, log_ratio, layers in reversed(evidence):
        weight = layers / (2 * noise * noise) * newness
        newness *= _DECAY
        if source < destination:
            pairs.setdefault((source, destination), []).append((log_ratio, weight))
        else:
            pairs.setdefault((destination, source), []).append((-log_ratio, weight))
    normal = [[0.0] * num_stages for _ in range(num_stages)]
    right = [0.0] * num_stages
    for stage in range(num_stages):
        normal[stage][stage] = 1 / (_PRIOR * _PRIOR)
    for (low, high), ratios in pairs.items():
        total = sum(weight for _, weight in ratios)
        ratio = sum(log_ratio * weight for log_ratio, weight in ratios) / total
        if abs(ratio) < _SIGNIFICANT / math.sqrt(total):
            ratio = 0.0
        for stage, other, sign in ((low, high, -1.0), (high, low, 1.0)):
            normal[stage][stage] += total
            normal[stage][other] -= total
            right[stage] += sign * total * ratio
    slowness = _solved(normal, right)
    mean = statistics.fmean(slowness)
    return tuple(exp(mean - slow) for slow in slowness)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve linear equations by elimination, in place. No pivot is needed: the diagonal outweighs each row's rest."""
    size = len(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            if factor:
                for column in range(pivot, size):
                    matrix[row][column] -= factor * matrix[pivot][column]
                right[row] -= factor * right[pivot]
    for row in reversed(range(size)):
        known = sum(matrix[row][column] * right[column] for column in range(row + 1, size))
        right[row] = (right[row] - known) / matrix[row][row]
    return right
