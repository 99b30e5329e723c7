"""Orders of long batches, made by repeating those of shorter ones."""

import pytest

from ds_dynmo.schedules import (
    PassBytes,
    PassCosts,
    Schedule,
    gradient_first_1f1b,
    one_f_one_b,
    peak_bytes,
    replay,
    zb_h1,
)
from ds_dynmo.schedules.greedy import Policy, greedy
from ds_dynmo.schedules.repeating import repeated
from tests.pure.schedules.test_schedule import chain


def longer(made: Schedule, more: int) -> Schedule:
    orders = repeated(made.orders, made.micro_batches, more)
    assert orders is not None
    return Schedule(made.owners, made.micro_batches + more, tuple(map(tuple, orders)))


@pytest.mark.parametrize("generate", [one_f_one_b, gradient_first_1f1b, zb_h1])
def test_a_fixed_order_repeated_is_the_longer_fixed_order(generate: type) -> None:
    for stages in range(1, 6):
        assert longer(generate(stages, 2 * stages + 4), 8) == generate(stages, 2 * stages + 12)


def test_a_greedy_order_repeated_takes_the_bottlenecks_time_for_what_is_added() -> None:
    costs = PassCosts.chain([1.0, 1.2, 0.9, 1.1], [1.0, 0.9, 1.2, 1.0], [0.9, 1.1, 1.0, 1.2])
    sizes = PassBytes.equal(4)
    orders = greedy(costs, 20, sizes, [4] * 4, Policy())
    assert orders is not None
    short = Schedule(costs.owners, 20, tuple(map(tuple, orders)))
    long = longer(short, 40)
    added = replay(long, costs).iteration_seconds - replay(short, costs).iteration_seconds
    assert added == pytest.approx(40 * 3.3, rel=0.01)
    assert peak_bytes(long, sizes) == peak_bytes(short, sizes)


def test_orders_without_a_period_are_not_repeated() -> None:
    never = chain("F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2", micro_batches=3)
    assert repeated(never.orders, 3, 4) is None
