"""scripts/emulate.py prediction: the fit, and the inputs of each prediction."""

from __future__ import annotations

import random

import pytest

from benchmarks.prediction import Draw, Fit, by_stage, errors_of, fit

MICRO_BATCHES = 4


def draws(true: Fit, count: int, seed: int) -> list[Draw]:
    """Make iterations that take exactly the seconds of ``true``."""
    chooser = random.Random(seed)
    found = []
    for _ in range(count):
        stages = tuple([chooser.uniform(low, 5 * low) for _ in range(3)] for low in (0.01, 0.02))
        seen = (stages[0], stages[1])
        found.append(Draw(true.predicts(seen, MICRO_BATCHES), seen, seen, [0, 1, 2, 3]))
    return found


def test_the_fit_finds_the_engines_overhead() -> None:
    true = Fit(pass_seconds=0.0013, link_seconds=0.0006, iteration_seconds=0.01)
    found = fit(draws(true, 6, seed=0), MICRO_BATCHES)
    others = draws(true, 4, seed=1)
    errors = errors_of(others, found, MICRO_BATCHES)
    assert max(map(abs, errors["fitted"])) < 1e-3
    assert max(errors["profile"]) < -0.01, "what the engine adds is not in the layers' own seconds"
    assert all(ideal <= profile for ideal, profile in zip(errors["ideal"], errors["profile"]))


def test_the_fit_finds_no_overhead_where_there_is_none() -> None:
    found = fit(draws(Fit(), 3, seed=0), MICRO_BATCHES)
    assert found.pass_seconds == pytest.approx(0.0, abs=2e-6) and found.link_seconds == pytest.approx(0.0, abs=2e-6)


def test_a_stage_takes_the_sum_of_its_layers() -> None:
    passes = (1.0, 2.0, 4.0, 8.0), (3.0, 5.0, 7.0, 11.0)
    assert by_stage(passes, [0, 1, 3, 4]) == ([1.0, 6.0, 8.0], [3.0, 12.0, 11.0])
