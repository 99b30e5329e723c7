"""The shortest order that is found."""

import random
import statistics
import time
from typing import get_args

import pytest

from ds_dynmo.errors import ScheduleError
from ds_dynmo.placement import Shape, owners_of
from ds_dynmo.schedules import (
    PassBytes,
    PassCosts,
    best_schedule,
    interleaved_1f1b,
    one_f_one_b,
    one_f_one_b_limit,
    peak_bytes,
    replay,
    schedule_for_equal_costs,
)
from tests.schedules.instances import random_instance, two_chunk_instance


def spread(rng: random.Random, stages: int, price: float) -> PassCosts:
    parts = [[rng.uniform(0.7, 1.3) for _ in range(stages)] for _ in range(3)]
    whole = [(i + w) / price for i, w in zip(*parts[1:], strict=True)]
    return PassCosts.chain(*parts, whole)


def test_equal_passes_on_8_stages() -> None:
    for micro_batches, seconds in ((12, 43), (16, 55), (32, 103)):
        found = best_schedule(PassCosts.equal(range(8)), micro_batches, PassBytes.equal(8), [8] * 8)
        assert found.iteration_seconds == found.lower_bound_seconds == seconds
        assert max(found.peak_bytes) == 8


@pytest.mark.parametrize("count", [70, pytest.param(200, marks=pytest.mark.nightly)])
def test_random_instances_are_within_5_percent_of_the_bound_on_average(count: int) -> None:
    rng = random.Random(7)
    over = []
    for _ in range(count):
        costs, micro_batches, sizes, limits = random_instance(rng)
        found = best_schedule(costs, micro_batches, sizes, limits)
        assert found.iteration_seconds == replay(found.schedule, costs).iteration_seconds
        assert found.iteration_seconds >= found.lower_bound_seconds * (1 - 1e-9)
        assert found.peak_bytes == peak_bytes(found.schedule, sizes)
        assert all(peak <= limit for peak, limit in zip(found.peak_bytes, limits, strict=True))
        plain = replay(one_f_one_b(costs.num_stages, micro_batches), costs).iteration_seconds
        assert found.iteration_seconds <= plain
        over.append(found.iteration_seconds / found.lower_bound_seconds)
    assert statistics.mean(over) <= 1.05


def test_limits_are_what_the_largest_stage_holds_under_1f1b() -> None:
    rng = random.Random(12)
    for _ in range(15):
        costs, micro_batches, sizes, _ = random_instance(rng)
        most = max(peak_bytes(one_f_one_b(costs.num_stages, micro_batches), sizes))
        assert one_f_one_b_limit(sizes, micro_batches) == (most,) * costs.num_stages
        assert one_f_one_b_limit(sizes, micro_batches, 1.5) == (int(1.5 * most),) * costs.num_stages


def test_the_same_numbers_give_the_same_schedule() -> None:
    costs, micro_batches, sizes, limits = random_instance(random.Random(8))
    first, second = (best_schedule(costs, micro_batches, sizes, limits) for _ in range(2))
    assert first == second and first.schedule.hash == second.schedule.hash


def test_splits_that_cost_fill_gaps_only() -> None:
    costs = PassCosts.chain([1.0] * 8, [1.05] * 8, [1.05] * 8, [2.0] * 8)
    found = best_schedule(costs, 32, PassBytes.equal(8), [8] * 8)
    assert 0 < found.schedule.splits < 0.8 * 8 * 32
    assert found.iteration_seconds < 0.92 * replay(one_f_one_b(8, 32), costs).iteration_seconds


@pytest.mark.nightly
@pytest.mark.parametrize(("stages", "micro_batches", "seconds"), [(8, 16, 0.1), (24, 48, 1.0), (64, 256, 5.0)])
def test_seconds_to_find_an_order(stages: int, micro_batches: int, seconds: float) -> None:
    costs, sizes = spread(random.Random(10), stages, 1.05), PassBytes.equal(stages)
    began = time.process_time()
    best_schedule(costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches))
    assert time.process_time() - began <= seconds


# Seconds over the work of a stage: equal layers, weights take 0.4 of a backward pass, both parts 1.05 of it in one.
SIZES = [(4, 8, 16), (8, 16, 32), (8, 32, 32), (16, 32, 64)]  # stages, micro-batches, layers
OVER_WORK: dict[Shape, list[float]] = {
    "chain": [1.207, 1.239, 1.136, 1.255],
    "v": [1.111, 1.128, 1.086, 1.139],
    "loop": [1.145, 1.155, 1.104, 1.197],
}


@pytest.mark.parametrize("shape", get_args(Shape))
def test_equal_layers_on_any_shape_with_the_memory_of_1f1b(shape: Shape) -> None:
    for (stages, micro_batches, layers), expected in zip(SIZES, OVER_WORK[shape], strict=True):
        owners = owners_of(shape, stages)
        size = layers // len(owners)
        seconds = [(own * size,) * len(owners) for own in (1.0, 2 * 1.05 * 0.6, 2 * 1.05 * 0.4, 2.0)]
        sizes = PassBytes.equal(len(owners), size)
        limits = one_f_one_b_limit(sizes, micro_batches, owners=owners)
        found = best_schedule(PassCosts(owners, *seconds), micro_batches, sizes, limits)
        assert found.iteration_seconds <= expected * micro_batches * 3 * layers / stages
        assert max(found.peak_bytes) <= limits[0] == stages * layers // stages


@pytest.mark.parametrize(("memory", "chain", "v"), [(0.5, 1.90, 1.58), (0.75, 1.45, 1.28), (1.25, 1.21, 1.125)])
def test_with_less_memory_the_v_loses_less(memory: float, chain: float, v: float) -> None:
    shapes: dict[Shape, float] = {"chain": chain, "v": v}
    for shape, expected in shapes.items():
        owners = owners_of(shape, 8)
        seconds = [(own * 32 / len(owners),) * len(owners) for own in (1.0, 2 * 1.05 * 0.6, 2 * 1.05 * 0.4, 2.0)]
        sizes = PassBytes.equal(len(owners), 32 // len(owners))
        limits = one_f_one_b_limit(sizes, 16, memory, owners=owners)
        assert best_schedule(PassCosts(owners, *seconds), 16, sizes, limits).iteration_seconds <= expected * 16 * 12


@pytest.mark.parametrize("shape", ["v", "loop"])
def test_orders_of_two_chunks_are_valid_and_fit(shape: Shape) -> None:
    rng = random.Random(13)
    for _ in range(20):
        costs, micro_batches, sizes, limits = two_chunk_instance(rng, shape, rng.choice([0.75, 1.0, 1.5]))
        found = best_schedule(costs, micro_batches, sizes, limits)  # the schedule checks itself
        assert found.iteration_seconds == replay(found.schedule, costs).iteration_seconds
        assert found.iteration_seconds >= found.lower_bound_seconds * (1 - 1e-9)
        assert all(peak <= limit for peak, limit in zip(found.peak_bytes, limits, strict=True))


@pytest.mark.parametrize("shape", get_args(Shape))
def test_if_splits_cost_too_much_nothing_is_split_on_any_shape(shape: Shape) -> None:
    owners = owners_of(shape, 4)
    seconds = [(own,) * len(owners) for own in (1.0, 2.0, 2.0, 2.0)]
    costs, sizes = PassCosts(owners, *seconds), PassBytes.equal(len(owners))
    for memory in (1.0, 1.5):
        found = best_schedule(costs, 8, sizes, one_f_one_b_limit(sizes, 8, memory, owners=owners))
        assert found.schedule.splits == 0
        if shape == "chain" or (shape == "loop" and memory > 1):
            fixed = one_f_one_b(4, 8) if shape == "chain" else interleaved_1f1b(4, 8)
            assert found.iteration_seconds <= replay(fixed, costs).iteration_seconds


def test_the_order_before_the_first_profile_is_of_the_shape() -> None:
    for shape in get_args(Shape):
        schedule = schedule_for_equal_costs(4, 8, shape=shape)
        sizes = PassBytes.equal(schedule.num_chunks)
        assert schedule.owners == owners_of(shape, 4)
        assert max(peak_bytes(schedule, sizes)) <= one_f_one_b_limit(sizes, 8, owners=schedule.owners)[0]


def test_less_than_one_micro_batch_is_refused_with_the_numbers() -> None:
    sizes = PassBytes((10, 10), (10, 10), (0, 5))
    with pytest.raises(
        ScheduleError, match="stage 1 may hold 14 bytes of passes, one micro-batch needs 15 bytes there"
    ):
        best_schedule(PassCosts.equal(range(2)), 4, sizes, [14, 14])
    assert max(best_schedule(PassCosts.equal(range(2)), 4, sizes, [15, 15]).peak_bytes) <= 15
    with pytest.raises(ScheduleError, match=r"2 chunks on 2 stages need .* got 2 and 1"):
        best_schedule(PassCosts.equal(range(2)), 4, sizes, [15])
