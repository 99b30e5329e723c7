"""The bottleneck is never larger than that of DeepSpeed's own balancer."""

import random

from deepspeed.runtime.utils import partition_balanced

from ds_dynmo.partitioners import balanced, bottleneck
from tests.partitioners.instances import KINDS, plain_bottleneck, random_costs


def test_the_bottleneck_is_never_larger_than_deepspeeds() -> None:
    rng = random.Random(0)
    smaller = 0
    for case in range(2000):
        num_layers = rng.randint(1, 9)
        num_stages = rng.randint(1, num_layers)
        costs = random_costs(rng, num_layers, KINDS[case % len(KINDS)])
        theirs = plain_bottleneck(costs, [int(bound) for bound in partition_balanced(costs, num_stages)])
        ours = bottleneck(costs, balanced(costs, num_stages))
        assert ours <= theirs, (costs, num_stages)
        smaller += ours < theirs
    assert smaller > 0


def test_the_known_case() -> None:
    assert plain_bottleneck([4, 9, 7, 5], [int(bound) for bound in partition_balanced([4, 9, 7, 5], 3)]) == 13
    assert bottleneck([4, 9, 7, 5], balanced([4, 9, 7, 5], 3)) == 12
