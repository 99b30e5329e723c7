"""Orders for batches without a pause between them: their periods, bounds, and that memory is what shortens them."""

from __future__ import annotations

import random

import pytest

from ds_dynmo.errors import ScheduleError
from ds_dynmo.placement import Shape
from ds_dynmo.schedules import (
    PassBytes,
    PassCosts,
    best_schedule,
    one_f_one_b,
    one_f_one_b_limit,
    peak_bytes,
    period_seconds,
    replay,
    schedule_for_equal_costs,
    shortest_period,
)
from tests.schedules.instances import random_instance, two_chunk_instance
from tests.support.split_orders import gradient_first_1f1b, zb_h1


def test_under_equal_costs_the_memory_of_1f1b_lets_no_batch_begin_earlier() -> None:
    """The first stage waits for its first gradient as long as the pipeline takes to fill and drain."""
    costs = PassCosts.equal(range(8))
    for schedule in (one_f_one_b(8, 16), gradient_first_1f1b(8, 16), zb_h1(8, 16), schedule_for_equal_costs(8, 16)):
        assert period_seconds(schedule.orders, 16, costs) == replay(schedule, costs).iteration_seconds


def test_more_memory_shortens_the_period_to_the_work_of_a_stage() -> None:
    """8 stages, 16 micro-batches of 3 seconds, which are 55 seconds alone: at twice the memory nothing waits."""
    costs, sizes = PassCosts.equal(range(8)), PassBytes.equal(8)
    for memory, period in ((1.0, 55.0), (1.25, 53.0), (1.5, 51.0), (1.875, 48.0), (2.0, 48.0)):
        limits = one_f_one_b_limit(sizes, 16, memory)
        schedule = schedule_for_equal_costs(8, 16, memory, back_to_back=True)
        assert period_seconds(schedule.orders, 16, costs) == period == shortest_period(costs, 16, sizes, limits)
        assert replay(schedule, costs).iteration_seconds == 55
        assert all(peak <= limit for peak, limit in zip(peak_bytes(schedule, sizes), limits))
    for memory, period in ((1.0, 49.5), (1.25, 48.0)):  # a V needs less
        schedule = schedule_for_equal_costs(8, 16, memory, shape="v", back_to_back=True)
        assert period_seconds(schedule.orders, 16, PassCosts.equal(schedule.owners, 0.5)) == period


def test_a_stage_that_works_longest_sets_the_period() -> None:
    costs = PassCosts.chain([1.0, 2.0, 1.0], [1.0, 2.0, 1.0], [1.0, 2.0, 1.0])
    sizes = PassBytes.equal(3)
    limits = one_f_one_b_limit(sizes, 8, 2.0)
    assert shortest_period(costs, 8, sizes, limits) == 8 * 6.0
    assert (
        period_seconds(best_schedule(costs, 8, sizes, limits, back_to_back=True).schedule.orders, 8, costs) == 8 * 6.0
    )


def test_random_pipelines() -> None:
    rng = random.Random(0)
    for _ in range(10):
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


@pytest.mark.parametrize("shape", ["v", "loop"])
def test_no_order_of_two_chunks_has_a_shorter_period(shape: Shape) -> None:
    rng, waits = random.Random(5), 0
    for _ in range(18):
        costs, micro_batches, sizes, limits = two_chunk_instance(rng, shape, rng.choice([0.5, 1.0, 2.0]))
        try:
            found = best_schedule(costs, micro_batches, sizes, limits, back_to_back=True)
        except ScheduleError:  # half the memory may hold no micro-batch
            continue
        bound = shortest_period(costs, micro_batches, sizes, limits)
        assert bound <= period_seconds(found.schedule.orders, micro_batches, costs) * (1 + 1e-9)
        waits += bound > shortest_period(costs, micro_batches, sizes, [10**9] * costs.num_stages)
    assert waits


def test_the_bound_of_a_chain_by_hand() -> None:
    """Stage 0 has room for 2 forward passes of 1 second, and its first gradient arrives after 1 + 2 + 4."""
    costs = PassCosts.chain([1.0, 2.0], [2.0, 4.0], [2.0, 4.0], link_seconds=0.5)
    assert shortest_period(costs, 4, PassBytes.equal(2), [2, 4]) == max(4 * 5.0 + (1 + 2 + 4 + 2 * 0.5) - 2, 4 * 10.0)
    assert shortest_period(costs, 2, PassBytes.equal(2), [1, 4]) == max(2 * 5.0 + (1 + 2 + 4 + 2 * 0.5) - 1, 2 * 10.0)
