"""The seconds that the next move is expected to take."""

from __future__ import annotations

import random

import pytest

from ds_dynmo.partitioners import MoveCosts


def test_nothing_is_known_before_the_first_move() -> None:
    assert MoveCosts().seconds(10**9) == 0.0


def test_fixed_seconds_and_bandwidth_are_told_apart() -> None:
    rng = random.Random(2)
    costs = MoveCosts()
    for _ in range(30):
        size = rng.randrange(10**6, 10**9)
        costs.record(size, (0.02 + size / 1e9) * rng.uniform(0.95, 1.05))
    for size in (10**7, 10**8, 10**9):
        assert costs.seconds(size) == pytest.approx(0.02 + size / 1e9, rel=0.1, abs=0.03)


def test_neither_term_is_negative() -> None:
    falling = MoveCosts([(100, 5.0), (300, 3.0)])
    assert falling.seconds(0) == falling.seconds(1000) == 4.0
    steep = MoveCosts([(100, 0.1), (300, 5.0)])
    assert steep.seconds(0) == pytest.approx(0.0) and steep.seconds(200) == pytest.approx(2.55)


def test_moves_without_bytes() -> None:
    assert MoveCosts([(0, 2.0)]).seconds(50) == 2.0


def test_the_latest_moves_count() -> None:
    costs = MoveCosts([(100, 9.0)] * 20)
    for _ in range(16):
        costs.record(100, 1.0)
    assert costs.seconds(100) == 1.0 == MoveCosts(costs.state()).seconds(100)
