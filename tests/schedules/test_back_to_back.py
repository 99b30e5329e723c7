"""Orders for batches without a pause between them: their periods, bounds, and that memory is what shortens them."""

from __future__ import annotations

import random

import pytest

from ds_dynmo.schedules import (
    PassBytes,
    PassCosts,
    best_schedule,
    gradient_first_1f1b,
    one_f_one_b,
    one_f_one_b_limit,
    peak_bytes,
    period_seconds,
    replay,
    schedule_for_equal_costs,
    shortest_period,
    zb_h1,
)
from tests.schedules.instances import random_instance


def test_under_equal_costs_the_memory_of_1f1b_lets_no_batch_begin_earlier() -> None:
    """The first stage waits for its first gradient as long as the pipeline takes to fill and drain."""
    costs = PassCosts.equal(range(8))
    for schedule in (one_f_one_b(8, 16), gradient_first_1f1b(8, 16), zb_h1(8, 16), schedule_for_equal_costs(8, 16)):
        assert period_seconds(schedule.orders, 16, costs) == replay(schedule, costs).iteration_seconds


@pytest.mark.parametrize(("memory", "period"), [(1.0, 55.0), (1.25, 53.0), (1.5, 51.0), (1.875, 48.0), (2.0, 48.0)])
def test_more_memory_shortens_the_period_to_the_work_of_a_stage(memory: float, period: float) -> None:
    """8 stages, 16 micro-batches of 3 seconds, which are 55 seconds alone: at twice the memory nothing waits."""
    costs, sizes = PassCosts.equal(range(8)), PassBytes.equal(8)
    limits = one_f_one_b_limit(sizes, 16, memory)
    schedule = schedule_for_equal_costs(8, 16, memory, back_to_back=True)
    assert period_seconds(schedule.orders, 16, costs) == period == shortest_period(costs, 16, sizes, limits)
    assert replay(schedule, costs).iteration_seconds == 55
    assert all(peak <= limit for peak, limit in zip(peak_bytes(schedule, sizes), limits))


def test_a_stage_that_works_longest_sets_the_period() -> None:
    costs = PassCosts.chain([1.0, 2.0, 1.0], [1.0, 2.0, 1.0], [1.0, 2.0, 1.0])
    sizes = PassBytes.equal(3)
    limits = one_f_one_b_limit(sizes, 8, 2.0)
    assert shortest_period(costs, 8, sizes, limits) == 8 * 6.0
    assert (
        period_seconds(best_schedule(costs, 8, sizes, limits, back_to_back=True).schedule.orders, 8, costs) == 8 * 6.0
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_pipelines(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        costs, micro_batches, sizes, _ = random_instance(rng)
        limits = one_f_one_b_limit(sizes, micro_batches, 2.0)
        alone, found = (
            best_schedule(costs, micro_batches, sizes, limits, back_to_back=overlap) for overlap in (False, True)
        )
        periods = [period_seconds(one.schedule.orders, micro_batches, costs) for one in (alone, found)]
        assert shortest_period(costs, micro_batches, sizes, limits) <= periods[1] * (1 + 1e-9)
        assert periods[1] <= periods[0] <= alone.iteration_seconds * (1 + 1e-9)
        assert found.iteration_seconds <= alone.iteration_seconds * 1.01
        assert found.iteration_seconds == pytest.approx(replay(found.schedule, costs).iteration_seconds)
        assert all(peak <= limit for peak, limit in zip(found.peak_bytes, limits))
