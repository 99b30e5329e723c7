"""Splits that fill no gap are fused again."""

import random

from ds_dynmo.schedules import PassCosts, Schedule, peak_bytes, replay
from ds_dynmo.schedules.fusing import fuse
from ds_dynmo.schedules.order import run
from tests.schedules.instances import chain, random_instance
from tests.support.split_orders import gradient_first_1f1b, zb_h1


def fused(made: Schedule, costs: PassCosts) -> Schedule:
    result = fuse(made.orders, made.micro_batches, costs, run(made.orders, made.micro_batches, costs))
    schedule = Schedule(made.owners, made.micro_batches, tuple(map(tuple, result.orders)))
    assert result.seconds == replay(schedule, costs).iteration_seconds
    return schedule


def test_one_stage_needs_no_split() -> None:
    costs = PassCosts.chain([1.0], [1.1], [1.1], [2.0])
    assert str(fused(chain("F0 F1 I0 W0 I1 W1"), costs)) == "stage 0: F0 F1 B0 B1"


def test_a_gradient_that_is_waited_for_leaves_first() -> None:
    # Stage 0 waits for both gradients. Nobody waits for its own last weight gradient.
    made = fused(chain("F0 F1 I0 W0 I1 W1", "F0 I0 W0 F1 I1 W1"), PassCosts.equal(range(2)))
    assert str(made) == "stage 0: F0 F1 B0 B1\nstage 1: F0 B0 F1 I1 W1"
    assert replay(made, PassCosts.equal(range(2))).iteration_seconds == 8


def test_weight_gradients_stay_in_the_order_of_the_micro_batches() -> None:
    # W0 is left for the end, so W1 cannot run with I1.
    made = fused(zb_h1(3, 4), PassCosts.equal(range(3)))
    assert str(made).splitlines()[2] == "stage 2: F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_with_no_price_the_iteration_and_the_memory_never_grow() -> None:
    rng = random.Random(6)
    fewer = 0
    for _ in range(25):
        costs, micro_batches, sizes, _ = random_instance(rng)
        for generate in (gradient_first_1f1b, zb_h1):
            made = generate(costs.num_stages, micro_batches)
            result = fused(made, costs)  # checks itself
            assert replay(result, costs).iteration_seconds <= replay(made, costs).iteration_seconds * (1 + 1e-8)
            peaks = zip(peak_bytes(result, sizes), peak_bytes(made, sizes), strict=True)
            assert all(after <= before for after, before in peaks)
            fewer += result.splits < made.splits
    assert fewer > 25
