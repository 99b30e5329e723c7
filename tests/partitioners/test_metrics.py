import itertools
import random

import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import bottleneck, bubble_ratio, imbalance, loads, potential


def test_loads_are_rounded_once_whatever_the_order() -> None:
    assert loads([0.1] * 10, [0, 10]) == [1.0]
    assert loads([1e16, 1.0, 1.0], [0, 3]) == loads([1.0, 1.0, 1e16], [0, 3]) == [1e16 + 2]


def test_a_slow_stage_has_a_larger_load() -> None:
    assert loads([1, 2, 3], [0, 1, 3], [2.0, 0.5]) == [0.5, 10.0]
    with pytest.raises(PartitionError, match="2 stages need 2 speeds, got 1"):
        loads([1, 2, 3], [0, 1, 3], [2.0])


def test_imbalance_is_equation_2() -> None:
    assert imbalance([1, 2, 3, 6], [0, 2, 3, 4]) == (6 - 3) / 4
    assert imbalance([2, 2], [0, 1, 2]) == 0.0
    assert imbalance([0, 0], [0, 1, 2]) == 0.0


def test_bottleneck_is_the_largest_load() -> None:
    assert bottleneck([4, 9, 7, 5], [0, 1, 3, 4]) == 16


def test_potential_sums_the_gap_of_every_pair() -> None:
    rng = random.Random(0)
    for _ in range(50):
        values = [rng.uniform(0, 5) for _ in range(rng.randint(1, 8))]
        assert potential(values) == pytest.approx(sum(abs(a - b) for a, b in itertools.combinations(values, 2)))


def test_bubble_ratio_of_even_stages_is_the_textbook_one() -> None:
    for num_stages in (1, 2, 4):
        for micro_batches in (1, 3, 8):
            ratio = bubble_ratio([1.0] * 4, [2.0] * 4, range(0, 5, 4 // num_stages), micro_batches)
            assert ratio == pytest.approx((num_stages - 1) / (micro_batches + num_stages - 1))


def test_bubble_ratio_falls_with_the_bottleneck_and_grows_with_the_link() -> None:
    costs = [1.0, 1.0, 1.0, 3.0]
    uneven = bubble_ratio(costs, costs, [0, 2, 4], 8)
    even = bubble_ratio(costs, costs, [0, 3, 4], 8)
    assert even < uneven
    assert bubble_ratio(costs, costs, [0, 3, 4], 8, link_seconds=0.5) > even


def test_bubble_ratio_of_no_work_is_0() -> None:
    assert bubble_ratio([0, 0], [0, 0], [0, 1, 2], 4) == 0.0
