"""The lower bound: no order is shorter."""

import random

import numpy as np
import pytest

from ds_dynmo.placement import Shape, owners_of
from ds_dynmo.schedules import (
    PassBytes,
    PassCosts,
    interleaved_1f1b,
    lower_bound,
    lower_bounds,
    one_f_one_b,
    peak_bytes,
    replay,
)
from ds_dynmo.schedules.greedy import greedy
from ds_dynmo.schedules.order import run
from tests.schedules.instances import random_instance, two_chunk_instance
from tests.support.split_orders import gradient_first_1f1b, zb_h1


def test_bounds_by_hand() -> None:
    half = PassCosts.equal(owners_of("v", 8), 0.5)
    for micro_batches, chain, of_v in ((12, 43, 39.5), (16, 55, 51.5), (32, 103, 99.5)):
        assert lower_bound(PassCosts.equal(range(8)), micro_batches, PassBytes.equal(8), [8] * 8) == chain
        assert lower_bound(half, micro_batches, PassBytes.equal(16), [16] * 8) == of_v
    costs = PassCosts.chain([1, 2, 4], [8, 16, 32], [1, 1, 1], link_seconds=0.5)
    assert lower_bound(costs, 1) == 7 + 56 + 4 * 0.5 + 1 == replay(zb_h1(3, 1), costs).iteration_seconds
    # One micro-batch at a time: each passes forward and back before the next begins.
    assert lower_bound(PassCosts.equal(range(4)), 3, PassBytes.equal(4), [1] * 4) == 3 * 8 + 1


def test_no_order_is_shorter() -> None:
    rng = random.Random(2)
    for _ in range(25):
        costs, micro_batches, sizes, limits = random_instance(rng)
        free, tight = lower_bound(costs, micro_batches), lower_bound(costs, micro_batches, sizes, limits)
        assert free <= tight
        for generate in (one_f_one_b, gradient_first_1f1b, zb_h1):
            made = generate(costs.num_stages, micro_batches)
            seconds = replay(made, costs).iteration_seconds
            assert seconds >= free * (1 - 1e-9)
            if all(peak <= limit for peak, limit in zip(peak_bytes(made, sizes), limits, strict=True)):
                assert seconds >= tight * (1 - 1e-9)
        orders = greedy(costs, micro_batches, sizes, limits)
        assert orders and max(run(orders, micro_batches, costs).done) >= tight * (1 - 1e-9)


@pytest.mark.parametrize("shape", ["v", "loop"])
def test_no_order_of_two_chunks_is_shorter(shape: Shape) -> None:
    rng = random.Random(3)
    for _ in range(25):
        costs, micro_batches, sizes, limits = two_chunk_instance(rng, shape, rng.choice([0.75, 1.0, 2.0]))
        bound = lower_bound(costs, micro_batches, sizes, limits)
        assert lower_bound(costs, micro_batches) <= bound
        for supposed in (costs, PassCosts.equal(costs.owners)):
            orders = greedy(supposed, micro_batches, sizes, limits)
            if orders:
                assert max(run(orders, micro_batches, costs).done) >= bound * (1 - 1e-9)
    for stages in range(2, 6):
        costs = PassCosts.equal(owners_of("loop", stages), 0.5)
        seconds = replay(interleaved_1f1b(stages, 2 * stages), costs).iteration_seconds
        assert seconds >= lower_bound(costs, 2 * stages)


def test_bounds_of_many_pipelines_equal_those_of_each() -> None:
    rng = random.Random(4)
    several = [[[rng.uniform(0.5, 1.5) for _ in range(5)] for _ in range(4)] for _ in range(6)]
    arrays = np.array(several).transpose(1, 2, 0)  # [kind, chunk, pipeline]
    fits = np.array([3, 2, 2, 1, 1])
    links = [0.1, 0.2, 0.3, 0.4]
    together = lower_bounds(range(5), *arrays, 7, links, fits)
    for place, (forward, inputs, weights, backward) in enumerate(several):
        costs = PassCosts.chain(forward, inputs, weights, backward, links)
        assert together[place] == lower_bound(costs, 7, PassBytes.equal(5), fits.tolist())
