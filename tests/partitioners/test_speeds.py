"""Stage speeds, estimated from layers that ran on several stages."""

from __future__ import annotations

import itertools
import math
import random
from decimal import Decimal
from fractions import Fraction

import pytest

from ds_dynmo.partitioners import SpeedEvidence, relative_speeds
from ds_dynmo.partitioners.portable import exp, log


def evidence(
    speeds: list[float], pairs: list[tuple[int, int]], layers: int = 4, noise: float = 0.0
) -> list[SpeedEvidence]:
    rng = random.Random(1)
    return [
        SpeedEvidence(a, b, math.log(speeds[a] / speeds[b]) + rng.gauss(0, noise) * math.sqrt(2 / layers), layers)
        for a, b in pairs
    ]


def test_speeds_are_found_from_neighbours_alone() -> None:
    true = [1.0, 0.5, 1.0, 2.0]
    mean = math.prod(true) ** 0.25
    found = relative_speeds(evidence(true, [(0, 1), (2, 1), (3, 2)]), 4, 0.02)
    assert found == pytest.approx([speed / mean for speed in true], rel=0.01)


def test_contradictions_are_averaged_and_the_latest_counts_most() -> None:
    was, then = evidence([1.0, 0.5], [(0, 1)]), evidence([1.0, 0.8], [(1, 0)])
    for pieces, low, high in ((was + then, 0.62, 0.7), (was + 8 * then, 0.7, 0.8)):
        found = relative_speeds(pieces, 2, 0.02)
        assert low < found[1] / found[0] < high
    assert relative_speeds(then + was, 2, 0.02)[1] < relative_speeds(was + then, 2, 0.02)[1]


def test_differences_within_noise_count_as_equal() -> None:
    assert relative_speeds([SpeedEvidence(0, 1, 0.3, 1)], 2, 0.1) == (1.0, 1.0)
    found = relative_speeds([SpeedEvidence(0, 1, 0.3, 9)], 2, 0.1)
    assert found[0] / found[1] == pytest.approx(math.exp(0.3), rel=0.01)


def test_stages_without_evidence_are_average() -> None:
    assert relative_speeds([], 3, 0.05) == (1.0, 1.0, 1.0)
    found = relative_speeds(evidence([1.0, 0.5, 1.0], [(0, 1)]), 3, 0.02)
    assert found[2] == pytest.approx(1.0) and found[0] > 1.0 > found[1]


def test_speeds_solve_their_equations() -> None:
    """Compare the bits with those that exact arithmetic finds for two stages: their log speeds are opposite."""
    noise, layers, ratio = 0.125, 4, 0.5
    total = Fraction(layers) / (2 * Fraction(noise) ** 2)
    slow = float(total * Fraction(ratio) / (4 + 2 * total))
    found = relative_speeds([SpeedEvidence(0, 1, ratio, layers)], 2, noise)
    assert found == (exp(slow), exp(-slow))


def test_noisy_evidence_from_many_moves() -> None:
    true = [1.0, 0.6, 1.0, 1.5, 1.0]
    pairs = [pair for pair in itertools.permutations(range(5), 2) if abs(pair[0] - pair[1]) == 1] * 3
    found = relative_speeds(evidence(true, pairs, layers=3, noise=0.08), 5, 0.08)
    for a, b in itertools.combinations(range(5), 2):
        assert found[a] / found[b] == pytest.approx(true[a] / true[b], rel=0.2)


def test_exponentials_and_logarithms_are_right_but_for_the_last_bits() -> None:
    """They are of additions, products and quotients alone."""
    chooser = random.Random(0)
    for _ in range(600):
        value = 10 ** chooser.choice([chooser.uniform(-0.3, 0.3), chooser.uniform(-12, 12), 0.0])
        exact = float(Decimal(value).ln())
        assert abs(log(value) - exact) <= 4 * math.ulp(exact)
        power = chooser.choice([chooser.uniform(-1, 1), chooser.uniform(-40, 40), 0.0])
        exact = float(Decimal(power).exp())
        assert abs(exp(power) - exact) <= 4 * math.ulp(exact)
