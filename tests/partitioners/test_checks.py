import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import balanced, bottleneck, diffusion, imbalance, loads, uniform


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -0.5, -1, None, "3", 10**400, [1.0]])
@pytest.mark.parametrize("function", [balanced, diffusion])
def test_an_invalid_cost_is_refused_with_its_layer_and_value(function: Callable[..., Any], bad: Any) -> None:
    with pytest.raises(PartitionError, match=r"layer 2 costs ") as error:
        function([1.0, 2.0, bad, 4.0], 2)
    assert repr(bad) in str(error.value)


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


@pytest.mark.parametrize("function", [balanced, diffusion])
def test_impossible_stage_counts_are_refused_with_both_numbers(function: Callable[..., Any]) -> None:
    with pytest.raises(PartitionError, match="2 layers cannot fill 4 stages"):
        function([5, 5], 4)
    with pytest.raises(PartitionError, match="2 layers need at least 1 stage, got 0"):
        function([5, 5], 0)
    with pytest.raises(PartitionError, match="0 layers cannot fill 1 stage:"):
        function([], 1)


@pytest.mark.parametrize("function", [balanced, diffusion])
def test_numpy_costs_give_plain_ints(function: Callable[..., Any]) -> None:
    for dtype in (np.int64, np.float64, np.float32):
        partition = function(np.array([4, 9, 7, 5], dtype=dtype), 3)
        assert partition == [0, 1, 2, 4]
        assert all(type(boundary) is int for boundary in partition)


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
