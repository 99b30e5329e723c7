import random
import re
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import MemoryModel, balanced, bottleneck, loads
from tests.partitioners.instances import (
    KINDS,
    every_partition,
    overshoot,
    partitions_that_fit,
    plain_bottleneck,
    random_costs,
    random_memory,
    random_start,
    slowest_seconds,
)


def rank_of(
    partition: list[int], costs: list[float], speeds: list[float], start: list[int], sizes: list[int]
) -> tuple[Fraction, Fraction, int]:
    """Return the bottleneck, the least load as a negative number, and the bytes that move from ``start``."""
    exact = [Fraction(cost) for cost in costs]
    stages = zip(partition, partition[1:], speeds)
    of_stages = [sum(exact[a:b], Fraction(0)) / Fraction(speed) for a, b, speed in stages]
    ranges = zip(zip(start, start[1:]), zip(partition, partition[1:]))
    stay = sum(sum(sizes[max(a, c) : max(max(a, c), min(b, d))]) for (a, b), (c, d) in ranges)
    return max(of_stages), -min(of_stages), sum(sizes) - stay


def check(seed: int, count: int, most_layers: int) -> dict[str, int]:
    """Compare with every partition in exact numbers. Return how many instances were of a kind."""
    rng, seen = random.Random(seed), dict.fromkeys(("limited", "nothing fits", "another has the same bottleneck"), 0)
    for case in range(count):
        num_layers = rng.randint(1, most_layers)
        num_stages = rng.randint(1, num_layers)
        costs = random_costs(rng, num_layers, KINDS[case % len(KINDS)])
        memory = random_memory(rng, num_layers, num_stages) if case % 4 < 2 else None
        # Powers of two, so that a load over a speed is exact.
        speeds = [rng.choice([0.25, 0.5, 1.0, 2.0]) if case % 5 < 2 else 1.0 for _ in range(num_stages)]
        start, sizes = random_start(rng, num_layers, num_stages), [rng.randrange(5) for _ in range(num_layers)]
        partitions = list(every_partition(num_layers, num_stages))
        fitting = partitions_that_fit(partitions, memory)
        if memory is not None and not fitting:
            seen["nothing fits"] += 1
            with pytest.raises(PartitionError, match=r"stage \d+ needs \d+ bytes, its limit is \d+") as error:
                pytest.fail(f"{memory}: {balanced(costs, num_stages, memory=memory, speeds=speeds)}")
            words = re.search(r"stage (\d+) needs (\d+) bytes, its limit is (\d+)", str(error.value))
            assert words is not None
            stage, needed, limit = (int(number) for number in words.groups())
            assert limit == memory.limits[stage]
            assert needed - limit == min(overshoot(memory, partition) for partition in partitions)
            continue
        rank = partial(rank_of, costs=costs, speeds=speeds, start=start, sizes=sizes)
        ranks = [rank(partition) for partition in fitting]
        found = balanced(costs, num_stages, start=start, memory=memory, speeds=speeds, layer_bytes=sizes)
        instance = costs, num_stages, memory, speeds, start, sizes
        assert found in fitting and rank(found) == min(ranks), instance
        anywhere = balanced(costs, num_stages, memory=memory, speeds=speeds)
        assert anywhere in fitting and rank(anywhere)[:2] == min(ranks)[:2], instance
        assert balanced(costs, num_stages, memory=memory, speeds=speeds, start=anywhere) == anywhere, instance
        if len({*speeds}) == 1:
            assert balanced(costs, num_stages, memory=memory) == anywhere, "equal speeds change nothing"
            assert bottleneck(costs, anywhere) == min(plain_bottleneck(costs, partition) for partition in fitting)
        seen["limited"] += memory is not None
        seen["another has the same bottleneck"] += len({one for one in ranks if one[0] == min(ranks)[0]}) > 1
    return seen


def test_it_finds_the_smallest_bottleneck() -> None:
    """Within memory and at different speeds too; ties are decided by the least imbalance, then by the moved bytes."""
    seen = check(seed=7, count=800, most_layers=8)
    assert min(seen.values()) > 80, seen


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_random_instances(seed: int) -> None:
    assert min(check(seed=100 + seed, count=1500, most_layers=10).values()) > 120


LATE = MemoryModel((0,) * 4, (1, 1, 10, 1), (0,) * 4, limits=(12, 12, 12), micro_batches=3)
ONES = MemoryModel((1,) * 6, (0,) * 6, (0,) * 6, limits=(5, 5, 2), micro_batches=1)
BY_HAND: list[tuple[list[float], int, dict[str, Any], list[int]]] = [
    ([1e12, 1e-12, 1e12, 1e-12, 3e-12], 3, {}, [0, 1, 3, 5]),
    # In floats 1e16 + 1 is 1e16. It still matters on which side of a boundary the small layer is.
    ([10**16, 1, 10**16 - 1], 2, {}, [0, 1, 3]),
    ([3], 1, {}, [0, 1]),
    ([0.0, 5.0, 0.0], 3, {}, [0, 1, 2, 3]),
    ([5e-324, 0.0, 5e-324, 1e300], 3, {}, [0, 1, 3, 4]),
    # Where the bottleneck leaves a choice layers are spread.
    ([10, 1, 1, 1, 1], 3, {}, [0, 1, 3, 5]),
    ([1, 1, 1, 1, 10], 3, {}, [0, 2, 4, 5]),
    # Of equal bottlenecks the least imbalance: 10, 1 and 3 are less even than 10, 2 and 2.
    ([10, 1, 1, 1, 1], 3, {"start": [0, 1, 2, 5]}, [0, 1, 3, 5]),
    ([10, 1, 1, 1, 1, 1], 3, {"start": [0, 1, 3, 6]}, [0, 1, 3, 6]),
    ([10, 1, 1, 1, 1, 1], 3, {"start": [0, 1, 4, 6]}, [0, 1, 4, 6]),
    # Of equal imbalances the fewest moved bytes.
    ([10, 1, 1, 1, 1, 1], 3, {"start": [0, 1, 2, 6]}, [0, 1, 3, 6]),
    ([6, 0, 0, 0, 6], 2, {"start": [0, 1, 5]}, [0, 1, 5]),
    ([6, 0, 0, 6, 6, 6], 2, {"start": [0, 2, 6], "layer_bytes": [1] * 6}, [0, 4, 6]),
    # An even start stays only if it fits.
    ([10, 1, 1, 1, 1, 1], 3, {"start": [0, 1, 3, 6], "memory": replace(ONES, limits=(5, 5, 5))}, [0, 1, 3, 6]),
    ([10, 1, 1, 1, 1, 1], 3, {"start": [0, 1, 3, 6], "memory": ONES}, [0, 1, 4, 6]),
    # Layer 2 fits on the last stage only. Filling stage 0 as far as its load allows would give it layers 0 and 1, and
    # leave stage 1 with layer 2 or with nothing.
    ([1, 1, 1, 5], 3, {"memory": LATE}, [0, 1, 2, 4]),
    # A small limit in the middle.
    ([1] * 4, 3, {"memory": MemoryModel((4, 1, 4, 1), (0,) * 4, (0,) * 4, (9, 1, 9), 1)}, [0, 1, 2, 4]),
]


def test_partitions_by_hand() -> None:
    for costs, num_stages, options, expected in BY_HAND:
        assert balanced(costs, num_stages, **options) == expected, (costs, options)
    assert bottleneck([4, 9, 7, 5], balanced([4, 9, 7, 5], 3)) == 12  # the least gap between stages would give 13
    assert loads([0, 0, 0, 0], balanced([0, 0, 0, 0], 2)) == [0, 0]
    assert not LATE.fits(1, 2, 3) and bottleneck([1, 1, 1, 5], balanced([1, 1, 1, 5], 3)) == 5
    # Layers 3 and 4 fit together on stage 2 alone, and neither on stage 1: the first stages get less than they could.
    memory = MemoryModel((0,) * 5, (1, 1, 1, 8, 8), (0,) * 5, limits=(15, 15, 16), micro_batches=8)
    assert balanced([1, 1, 1, 1, 1], 3, memory=memory) in ([0, 1, 3, 5], [0, 2, 3, 5])


def test_what_is_refused() -> None:
    tight = MemoryModel((5, 5, 50), (0,) * 3, (0,) * 3, limits=(8, 40), micro_batches=1)
    refusals: list[tuple[int, int, dict[str, Any], str]] = [
        (6, 2, {"start": [0, 2, 6], "layer_bytes": [1] * 5}, "6 layers need 6 sizes in bytes, got 5"),
        (3, 2, {"start": [0, 1, 4]}, "from 0 to 3, for 2 stages and 3 layers"),
        (3, 2, {"memory": tight}, r"no partition fits.*stage 1 needs 50 bytes, its limit is 40"),
        (4, 2, {"memory": tight}, "for 3 layers and 2 stages, not for 4 and 2"),
        (2, 2, {"speeds": [1.0, 1.0, 1.0]}, "2 stages need 2 speeds, got 3"),
        (2, 2, {"speeds": [-1, 1]}, "stage 0 has speed -1"),
    ]
    for num_layers, num_stages, options, words in refusals:
        with pytest.raises(PartitionError, match=words):
            pytest.fail(f"{words}: {balanced([1] * num_layers, num_stages, **options)}")


def test_a_large_model_stays_within_one_layer_of_the_mean_load() -> None:
    rng = random.Random(5)
    costs = random_costs(rng, 1000, "uniform")
    found = bottleneck(costs, balanced(costs, 128))
    assert found == bottleneck(costs[::-1], balanced(costs[::-1], 128))
    assert sum(costs) / 128 <= found <= sum(costs) / 128 + max(costs)
    assert bottleneck(costs, balanced(costs, 128, start=random_start(rng, 1000, 128))) == found


def test_speeds_of_any_ratio() -> None:
    """Whose loads are rounded."""
    rng = random.Random(21)
    for case in range(50):
        num_layers = rng.randint(1, 9)
        num_stages = rng.randint(1, num_layers)
        costs, speeds = random_costs(rng, num_layers, KINDS[case % 5]), [rng.uniform(0.2, 2) for _ in range(num_stages)]
        best = min(slowest_seconds(costs, every, speeds) for every in every_partition(num_layers, num_stages))
        found = balanced(costs, num_stages, speeds=speeds)
        assert slowest_seconds(costs, found, speeds) == pytest.approx(best, rel=1e-12)
        assert balanced(costs, num_stages, speeds=speeds, start=found) == found
