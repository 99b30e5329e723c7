"""Orders made by simulation."""

import itertools
import random
from dataclasses import replace

import pytest

from ds_dynmo.placement import Shape, owners_of
from ds_dynmo.schedules import Action, Kind, PassBytes, PassCosts, Schedule, lower_bound, peak_bytes, replay
from ds_dynmo.schedules.greedy import greedy
from tests.schedules.instances import drawn, random_instance


def made(costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: list[int]) -> Schedule:
    orders = greedy(costs, micro_batches, sizes, limits)
    assert orders is not None
    return Schedule(costs.owners, micro_batches, tuple(map(tuple, orders)))


def test_equal_passes_of_a_chain_and_of_a_v_reach_their_bounds_with_1f1bs_memory() -> None:
    chain, v = PassCosts.equal(range(8)), PassCosts.equal(owners_of("v", 8), 0.5)
    for costs, micro_batches, seconds in (
        *((chain, number, seconds) for number, seconds in ((12, 43), (16, 55), (32, 103))),
        *((v, number, seconds) for number, seconds in ((12, 39.5), (16, 51.5), (32, 99.5))),
    ):
        chunks = len(costs.owners)
        found = made(costs, micro_batches, PassBytes.equal(chunks), [chunks] * 8)
        assert replay(found, costs).iteration_seconds == seconds
        most = max(peak_bytes(found, PassBytes.equal(chunks)))
        assert most == chunks if costs is chain else most <= chunks, (costs.owners, micro_batches)


def test_rounding_errors_change_no_order() -> None:
    tenths = PassCosts.equal(range(8), 0.1)  # sums of tenths are not what they should be
    of_tenths = greedy(tenths, 12, PassBytes.equal(8), [8] * 8)
    assert of_tenths == greedy(PassCosts.equal(range(8)), 12, PassBytes.equal(8), [8] * 8)


def test_orders_are_valid_and_fit() -> None:
    rng = random.Random(5)
    for _ in range(20):
        costs, micro_batches, sizes, limits = random_instance(rng)
        tight = [limit * 2 // 3 for limit in limits]
        for allowed in (list(limits), tight):
            orders = greedy(costs, micro_batches, sizes, allowed)
            if orders is not None:
                found = Schedule(costs.owners, micro_batches, tuple(map(tuple, orders)))  # checks itself
                assert all(peak <= limit for peak, limit in zip(peak_bytes(found, sizes), allowed, strict=True))


def test_stages_that_must_not_split_run_backward_passes_in_one() -> None:
    costs = PassCosts.chain([1, 1, 1], [2, 1, 1], [0, 1, 1])
    kinds = [{action.kind for action in order} for order in made(costs, 6, PassBytes.equal(3), [3] * 3).orders]
    assert kinds == [{Kind.FORWARD, Kind.BACKWARD}, *[{Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT}] * 2]


def test_a_backward_pass_runs_in_one_if_its_first_part_does_not_fit() -> None:
    sizes = PassBytes((10, 10), (15, 15), (0, 0))  # more is held after the pass than before it
    found = made(PassCosts.equal(range(2)), 4, sizes, [20, 20])
    assert max(peak_bytes(found, sizes)) <= 20
    assert Kind.BACKWARD in {action.kind for action in found.orders[0]}


def test_a_pass_that_would_hold_too_much_while_segments_are_recomputed_runs_in_one() -> None:
    sizes = PassBytes((1, 1), (1, 1), (5, 5), split_recomputed_bytes=(9, 9))
    found = made(PassCosts.equal(range(2)), 4, sizes, [10, 10])
    assert max(peak_bytes(found, sizes)) <= 10
    assert Kind.INPUT_GRADIENT in {action.kind for action in found.orders[1]}
    assert Kind.BACKWARD in {action.kind for action in found.orders[0]}  # two micro-batches are in flight


def test_too_little_memory_gives_no_order() -> None:
    assert greedy(PassCosts.equal(range(2)), 2, PassBytes.equal(2, 10), [10, 9]) is None


def test_a_small_v_by_hand() -> None:
    costs = PassCosts.equal((0, 1, 1, 0))
    sizes = PassBytes.equal(4)
    found = made(costs, 2, sizes, [4, 4])
    # Stage 0 owns chunks 0 and 3: the loss is where the input is.
    #   step     0  1  2  3  4  5  6  7  8  9  10 11 12
    #   stage 0  F0 F1 .  F0'I0'W0'F1'I1'I0 W1'W0 I1 W1
    #   stage 1  .  F0 F0'F1 F1'I0'I0 ...
    assert peak_bytes(found, sizes) <= (4, 4)
    timeline = replay(found, costs)
    assert timeline.iteration_seconds == lower_bound(costs, 2, sizes, [4, 4]) == 13
    assert found.orders[0][:3] == (Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 1), Action(Kind.FORWARD, 3, 0))
    assert drawn(timeline)


def test_orders_do_not_depend_on_what_is_frozen() -> None:
    """A layer that thaws between two decisions must not leave an order that cannot run."""
    frozen = PassCosts.chain([1, 1, 1], [0, 1, 1], [0, 1, 1], frozen_chunks=1)
    thawed = replace(frozen, frozen_chunks=0)
    args = (6, PassBytes((0, 1, 1), (0, 1, 1), (0, 0, 0)), [3, 3, 3])
    assert greedy(frozen, *args) == greedy(thawed, *args)


@pytest.mark.parametrize("shape", ["v", "loop"])
def test_memory_for_one_micro_batch_is_enough_for_two_chunks(shape: Shape) -> None:
    """A stage that filled its memory with inputs of its first chunk could never run its second one."""
    for shares, stages, room in itertools.product((False, True), (1, 2, 3, 5), (2, 3, 5)):
        costs, sizes = PassCosts.equal(owners_of(shape, stages)), PassBytes.equal(2 * stages)
        orders = greedy(costs, 6, sizes, [room] * stages, patient=shares, shares_memory=shares)
        assert orders is not None
        assert max(peak_bytes(Schedule(costs.owners, 6, tuple(map(tuple, orders))), sizes)) <= room


def test_a_gradient_leaves_first_where_there_is_memory_to_recompute_it_but_not_to_defer() -> None:
    sizes = PassBytes((1, 1, 1), (6, 6, 6), (6, 6, 6))
    found = made(PassCosts.equal(range(3)), 4, sizes, [9] * 3)
    assert max(peak_bytes(found, sizes)) <= 9
    assert found.splits
    for order in found.orders:
        for action, following in itertools.pairwise(order):
            if action.kind == Kind.INPUT_GRADIENT:
                assert following == action._replace(kind=Kind.WEIGHT_GRADIENT)
