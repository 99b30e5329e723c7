"""What metrics and balancers have in common: loads, and input that is refused."""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import (
    balanced,
    bottleneck,
    bubble_ratio,
    diffusion,
    imbalance,
    loads,
    potential,
    uniform,
)


@pytest.mark.parametrize("function", [balanced, diffusion])
def test_what_balancers_refuse_and_take(function: Callable[..., Any]) -> None:
    for bad in (math.nan, math.inf, -math.inf, -0.5, -1, None, "3", 10**400, [1.0]):
        with pytest.raises(PartitionError, match=r"layer 2 costs ") as error:
            pytest.fail(f"{bad}: {function([1.0, 2.0, bad, 4.0], 2)}")
        assert repr(bad) in str(error.value)
    for costs, stages, words in (
        ([5, 5], 4, "2 layers cannot fill 4 stages"),
        ([5, 5], 0, "2 layers need at least 1 stage, got 0"),
        ([], 1, "0 layers cannot fill 1 stage:"),
    ):
        with pytest.raises(PartitionError, match=words):
            pytest.fail(f"{words}: {function(costs, stages)}")
    for dtype in (np.int64, np.float64, np.float32):
        partition = function(np.array([4, 9, 7, 5], dtype=dtype), 3)
        assert partition == [0, 1, 2, 4]
        assert all(type(boundary) is int for boundary in partition)


@pytest.mark.parametrize("function", [loads, bottleneck, imbalance])
def test_metrics_refuse_what_balancers_refuse(function: Callable[..., Any]) -> None:
    with pytest.raises(PartitionError, match="layer 1 costs nan"):
        function([1.0, math.nan], [0, 1, 2])
    with pytest.raises(PartitionError, match="stage 1 would own no layer"):
        function([1.0, 1.0, 1.0], [0, 1, 1, 3])
    with pytest.raises(PartitionError, match="from 0 to 2, for 2 stages and 2 layers"):
        function([1.0, 1.0], [0, 1, 3])


def test_a_sum_beyond_the_float_range_is_refused() -> None:
    with pytest.raises(PartitionError, match="2 layers add up to more than a float can hold"):
        balanced([1.7e308, 1.7e308], 1)


def test_uniform_sizes_differ_by_at_most_one() -> None:
    assert uniform(8, 3) == [0, 3, 6, 8]
    assert uniform(4, 4) == [0, 1, 2, 3, 4]
    for num_layers in range(1, 30):
        for num_stages in range(1, num_layers + 1):
            partition = uniform(num_layers, num_stages)
            sizes = [stop - start for start, stop in zip(partition, partition[1:])]
            assert sum(sizes) == num_layers and len(sizes) == num_stages
            assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    with pytest.raises(PartitionError, match="3 layers cannot fill 4 stages"):
        uniform(3, 4)


def test_loads_are_rounded_once_whatever_the_order() -> None:
    assert loads([0.1] * 10, [0, 10]) == [1.0]
    assert loads([1e16, 1.0, 1.0], [0, 3]) == loads([1.0, 1.0, 1e16], [0, 3]) == [1e16 + 2]


def test_a_slow_stage_has_a_larger_load() -> None:
    assert loads([1, 2, 3], [0, 1, 3], [2.0, 0.5]) == [0.5, 10.0]
    with pytest.raises(PartitionError, match="2 stages need 2 speeds, got 1"):
        loads([1, 2, 3], [0, 1, 3], [2.0])


def test_imbalance_is_equation_2_and_the_bottleneck_the_largest_load() -> None:
    assert imbalance([1, 2, 3, 6], [0, 2, 3, 4]) == (6 - 3) / 4
    assert imbalance([2, 2], [0, 1, 2]) == imbalance([0, 0], [0, 1, 2]) == 0.0
    assert bottleneck([4, 9, 7, 5], [0, 1, 3, 4]) == 16


def test_potential_sums_the_gap_of_every_pair() -> None:
    rng = random.Random(0)
    for _ in range(50):
        values = [rng.uniform(0, 5) for _ in range(rng.randint(1, 8))]
        assert potential(values) == pytest.approx(sum(abs(a - b) for a, b in itertools.combinations(values, 2)))


def test_bubble_ratio() -> None:
    for num_stages, micro_batches in itertools.product((1, 2, 4), (1, 3, 8)):
        ratio = bubble_ratio([1.0] * 4, [2.0] * 4, range(0, 5, 4 // num_stages), micro_batches)
        assert ratio == pytest.approx((num_stages - 1) / (micro_batches + num_stages - 1)), "the textbook's"
    costs = [1.0, 1.0, 1.0, 3.0]
    even = bubble_ratio(costs, costs, [0, 3, 4], 8)
    assert even < bubble_ratio(costs, costs, [0, 2, 4], 8), "it falls with the bottleneck"
    assert even < bubble_ratio(costs, costs, [0, 3, 4], 8, link_seconds=0.5)
    assert bubble_ratio([0, 0], [0, 0], [0, 1, 2], 4) == 0.0, "no work"
