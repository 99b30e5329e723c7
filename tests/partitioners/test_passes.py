"""Partitions under our own schedules: bounds, orders, memory, and the shortest iteration."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import LayerPasses, PassModel, PipelineModel, balanced, makespan
from ds_dynmo.placement import Placement, owners_of
from ds_dynmo.schedules import (
    FoundSchedule,
    PassCosts,
    Schedule,
    best_schedule,
    one_f_one_b,
    peak_bytes,
    period_seconds,
    replay,
)
from tests.partitioners.instances import every_partition, memory_of, pipeline_of, random_passes


def pipeline(rng: random.Random, *sizes: int, interval: int = 0) -> PipelineModel:
    return pipeline_of(random_passes(rng, *sizes, interval=interval))


def with_layers(passes: PassModel, **values: Any) -> PassModel:
    return replace(passes, layers=replace(passes.layers, **values))


def seconds_of(passes: PassModel, schedule: Schedule, partition: list[int]) -> float:
    return replay(schedule, passes.costs(Placement.chain(partition))).iteration_seconds


@pytest.mark.parametrize("interval", [0, 2])
def test_stages_stay_within_their_share_of_the_largest_1f1b_peak_and_within_a_limit(interval: int) -> None:
    """Where 1F1B fits a limit an order does."""
    rng = random.Random(7)
    for _ in range(5):
        passes = random_passes(rng, interval=interval)
        for partition in rng.sample([*every_partition(7, 3)], 4):
            here = Placement.chain(partition)
            sizes = passes.layers.sizes(here)
            most = max(peak_bytes(one_f_one_b(3, passes.micro_batches), sizes))
            for memory in (1.0, 1.5):
                found = replace(passes, memory=memory).shortest(here)
                assert found is not None and found.peak_bytes == peak_bytes(found.schedule, sizes)
                assert max(found.peak_bytes) <= memory * most
            limit = max(memory_of(passes, interval).bytes_per_stage(here))
            found = replace(passes, limit_bytes=limit).shortest(here)
            assert found is not None
            for (start, stop), peak in zip(itertools.pairwise(partition), found.peak_bytes):
                assert sum(passes.layers.static_bytes[start:stop]) + peak <= limit


def test_another_number_of_stages_counts_with_orders_of_its_own() -> None:
    given = pipeline(random.Random(9))
    for stages in (1, 2, 4):
        other = given.on(stages)
        assert other is given.on(stages) and other.speeds == (1.0,) * stages
        for partition in [*every_partition(7, stages)][::2]:
            found, under_1f1b = other.shortest_schedule(partition), other.seconds_under_1f1b(partition)
            if stages == 1:
                assert found is None and other.iteration_seconds(partition) == under_1f1b
            else:
                assert found is not None and found.schedule.num_stages == stages
                assert other.iteration_seconds(partition) == found.iteration_seconds <= under_1f1b


def test_no_iteration_is_shorter_than_its_work() -> None:
    rng = random.Random(10)
    for _ in range(3):
        given = pipeline(rng)
        for model in (given, given.on(2), replace(given, passes=None)):
            shortest = min(map(model.iteration_seconds, every_partition(7, len(model.speeds))))
            assert 0.6 * shortest < model.work_seconds <= shortest * (1 + 1e-9)
        assert given.on(1).work_seconds <= given.on(1).iteration_seconds([0, 7]) * (1 + 1e-9)


def test_messages_are_held_beside_what_passes_hold() -> None:
    passes, here = random_passes(random.Random(4)), Placement.chain([0, 2, 4, 7])
    layers = with_layers(passes, input_bytes=(1, 2, 4, 8, 16, 32, 64)).layers
    whole = layers.sizes_with_messages(here, standing=3)
    assert whole.standing_bytes == (3 * 4, 3 * (4 + 16), 3 * 16)
    assert replace(whole, standing_bytes=()) == replace(layers.sizes(here), standing_bytes=())


def test_a_segment_is_recomputed_beside_what_those_after_it_hold() -> None:
    passes = random_passes(random.Random(4), interval=2)
    passes = with_layers(passes, activation_bytes=(5,) * 7, deferred_bytes=(1, 2, 4, 8, 16, 32, 64))
    sizes = passes.layers.sizes(Placement.chain([0, 1, 2, 7]))
    assert sizes.recomputed_bytes == (5, 5, 10)
    assert sizes.split_recomputed_bytes == (5, 5, 10 + 16 + 32 + 64)


def test_1f1b_runs_where_one_micro_batch_does_not_fit_or_auto_finds_nothing_shorter() -> None:
    passes, here = random_passes(random.Random(2)), [0, 2, 4, 7]
    tight = replace(passes, limit_bytes=max(passes.layers.static_bytes))
    alone = random_passes(random.Random(3), 7, 3, 1)
    without_weights = with_layers(
        alone, input_gradient_seconds=alone.layers.backward_seconds, weight_gradient_seconds=(0.0,) * 7
    )
    for passes in (tight, replace(without_weights, may_stay=True)):
        given = pipeline_of(passes)
        assert given.shortest_schedule(here) is None
        assert given.iteration_seconds(here) == given.seconds_under_1f1b(here)
    assert pipeline_of(alone).shortest_schedule(here) is not None


def test_makespan_of_many_layers_beats_the_partition_for_1f1b() -> None:
    rng = random.Random(6)
    for _ in range(2):
        given = pipeline(rng, 24, 4, 8)
        costs = [f + b for f, b in zip(given.forward_seconds, given.backward_seconds)]
        start = [0, 6, 12, 18, 24]
        for_1f1b = makespan(costs, 4, start=start, pipeline=replace(given, passes=None))
        chosen = makespan(costs, 4, start=start, pipeline=given)
        assert given.iteration_seconds(chosen) <= 1.005 * given.iteration_seconds(for_1f1b)
        assert makespan(costs, 4, start=start, pipeline=replace(given)) == chosen, "every rank decides the same"


def test_makespan_is_no_worse_than_the_smallest_bottleneck() -> None:
    """These are far from where 1F1B is best: none of its neighbours is as good."""
    for layers, stages, micro_batches, seed in ((24, 4, 8, 0), (16, 5, 6, 7)):
        given = pipeline(random.Random(seed), layers, stages, micro_batches)
        costs = [f + b for f, b in zip(given.forward_seconds, given.backward_seconds)]
        even = given.iteration_seconds(balanced(costs, stages, speeds=given.speeds))
        assert given.iteration_seconds(makespan(costs, stages, pipeline=given)) <= even


@pytest.mark.parametrize("shape", ["v", "loop"])
def test_an_order_that_is_far_from_short_is_not_kept_for_other_chunks(shape: Any) -> None:
    """Slices of a vocabulary at both ends: what is found first is 1.3 times as long as its bound."""
    forward = (*[0.0467] * 16, *[1.0] * 30, 0.001, *[0.4403] * 16)
    forward = tuple(one / 3 for one in forward)
    backward = tuple(2 * one for one in forward)
    split = (tuple(share * 1.05 * one for one in backward) for share in (0.6, 0.4))
    ones, zeros = (1,) * len(forward), (0,) * len(forward)
    found = LayerPasses(forward, *split, backward, zeros, ones, ones, zeros)
    owners = owners_of(shape, 8)

    def model() -> PipelineModel:
        return pipeline_of(PassModel(found, 16, (1.0,) * 8))

    start = [len(forward) * chunk // 16 for chunk in range(17)]
    fresh, costs = model(), model().layer_seconds
    chosen = Placement.of(makespan(costs, 8, start=start, pipeline=fresh, owners=owners), owners)
    even = Placement.of(balanced(costs, 8, owners=owners), owners)
    assert fresh.iteration_seconds(chosen) <= model().iteration_seconds(even) * (1 + 1e-9)


def counting(monkeypatch: pytest.MonkeyPatch) -> list[PassCosts]:
    """The costs for which an order is searched from here on."""
    searched: list[PassCosts] = []

    def search(costs: PassCosts, *others: Any, **options: Any) -> FoundSchedule:
        searched.append(costs)
        return best_schedule(costs, *others, **options)

    monkeypatch.setattr("ds_dynmo.partitioners.passes.best_schedule", search)
    return searched


EVEN = [0, 2, 4, 6, 8]


def equal_layers() -> PassModel:
    """Of which an order is found that can hardly be beaten, where they are spread evenly."""
    layers = (1.0,) * 8
    of_layers = LayerPasses(layers, layers, layers, (2.0,) * 8, (1,) * 8, (9,) * 8, (1,) * 8, (9,) * 8)
    return PassModel(of_layers, 12, (1.0,) * 4)


def test_no_order_is_searched_where_that_in_force_can_hardly_be_beaten(monkeypatch: pytest.MonkeyPatch) -> None:
    found = equal_layers().shortest(Placement.chain(EVEN))
    assert found is not None and found.schedule.splits
    running = replace(equal_layers(), in_force=found.schedule)
    searched = counting(monkeypatch)
    assert running.shortest(Placement.chain(EVEN)) == found and not searched
    assert running.shortest(Placement.chain([0, 1, 3, 6, 8])) is not None and len(searched) == 1, (
        "that order is not as good there"
    )


def running(seed: int) -> tuple[PassModel, float]:
    """Layers under the order for equal ones, and what that takes on an even partition, over the bound."""
    order = equal_layers().shortest(Placement.chain(EVEN))
    assert order is not None
    passes = replace(random_passes(random.Random(seed), 8, 4, 12), in_force=order.schedule, memory=4.0)
    bound = float(passes.lower_bounds(np.array([EVEN]).T, range(4))[0])
    return passes, seconds_of(passes, order.schedule, EVEN) / bound


def test_an_order_is_searched_again_once_it_has_become_worse_by_one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = counting(monkeypatch)
    worse = [found for found in map(running, range(10)) if found[1] > 1.02]
    assert len(worse) > 2
    for passes, over in worse:
        for known, times in ((0.0, 1), (over / 1.02, 1), (over / 1.005, 0)):
            searched.clear()
            found = replace(passes, in_force_over_bound=known).shortest(Placement.chain(EVEN))
            assert found is not None and len(searched) == times
            now = found.iteration_seconds / found.lower_bound_seconds
            assert found.over_bound == (pytest.approx(now) if times else known)


def test_searches_keep_to_the_actions_that_they_may_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four partitions those within 10% of their bound are searched while something is left."""
    searched, partitions = counting(monkeypatch), [EVEN, [0, 1, 4, 6, 8], [0, 2, 3, 6, 8], [0, 2, 4, 7, 8]]
    some = 10 * 3 * 4 * 12  # the actions of one or two searches
    counts = []
    for most in (0, some, math.inf):
        searched.clear()
        for seed in range(10):
            bounded = replace(running(seed)[0], search_actions=most)
            for partition in partitions:
                assert bounded.shortest(Placement.chain(partition)) is not None
        counts.append(len(searched))
    assert counts[0] < counts[1] < counts[2]


def test_an_order_far_above_its_bound_is_replaced_whatever_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    searched, far = counting(monkeypatch), 0
    for seed in range(20):
        passes, over = running(seed)
        searched.clear()
        found = replace(passes, search_actions=0).shortest(Placement.chain(EVEN))
        assert found is not None and len(searched) == (over > 1.1)
        far += over > 1.1
    assert 0 < far < 20
    assert replace(equal_layers(), search_actions=0).shortest(Placement.chain(EVEN)) is not None, "there was none"


def test_the_order_in_force_stays_where_none_is_found_that_is_shorter() -> None:
    """It was found when forward passes took up to 30% more or less."""
    rng, partition, better = random.Random(12), [0, 3, 6, 9, 12], 0
    here = Placement.chain(partition)
    for _ in range(20):
        passes = random_passes(rng, 12, 4, 9)
        forward = tuple(one * rng.uniform(0.7, 1.3) for one in passes.layers.forward_seconds)
        before, fresh = with_layers(passes, forward_seconds=forward).shortest(here), passes.shortest(here)
        assert before is not None and fresh is not None
        kept = replace(passes, in_force=before.schedule).shortest(here)
        assert kept is not None and kept.iteration_seconds <= fresh.iteration_seconds
        assert kept.iteration_seconds == pytest.approx(seconds_of(passes, kept.schedule, partition))
        assert kept.peak_bytes == peak_bytes(kept.schedule, passes.layers.sizes(here))
        assert kept.lower_bound_seconds == fresh.lower_bound_seconds
        better += kept.iteration_seconds < fresh.iteration_seconds
        assert kept.iteration_seconds <= seconds_of(passes, before.schedule, partition)
    assert better > 1


def test_an_order_in_force_that_does_not_suit_is_not_kept() -> None:
    """One of other stages or micro-batches, that needs more memory than there is, or that splits passes in vain."""
    passes = equal_layers()
    found = passes.shortest(Placement.chain(EVEN))
    assert found is not None
    for order in (one_f_one_b(3, 12), one_f_one_b(4, 11)):
        assert replace(passes, in_force=order).shortest(Placement.chain(EVEN)) == found
    tight = replace(passes, memory=0.8)
    small = tight.shortest(Placement.chain(EVEN))
    assert small is not None and max(small.peak_bytes) < max(found.peak_bytes)
    assert replace(tight, in_force=found.schedule).shortest(Placement.chain(EVEN)) == small
    whole = with_layers(
        passes, input_gradient_seconds=passes.layers.backward_seconds, weight_gradient_seconds=(0.0,) * 8
    )
    kept = replace(whole, in_force=found.schedule).shortest(Placement.chain(EVEN))
    assert kept is not None and kept.schedule.splits == 0


def test_partitions_that_can_hardly_be_better_get_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal layers, evenly spread: no other partition has a bound below what the first one takes."""
    passes = equal_layers()
    given = pipeline_of(passes)
    searched = counting(monkeypatch)
    assert makespan([3.0] * 8, 4, start=EVEN, pipeline=given) == EVEN
    assert len(searched) == 1


def test_partitions_that_are_not_worth_a_move_get_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layers take four times as long, so that other partitions are much shorter."""
    passes = replace(with_layers(equal_layers(), forward_seconds=(1.0,) * 5 + (4.0,) * 3), memory=4.0)
    order = equal_layers().shortest(Placement.chain(EVEN))
    assert order is not None
    for min_gain, moves in ((0.0, True), (0.9, False)):
        running = replace(passes, in_force=order.schedule, min_gain=min_gain)
        given = pipeline_of(running)
        searched = counting(monkeypatch)
        costs = [forward + 2.0 for forward in passes.layers.forward_seconds]
        assert (makespan(costs, 4, start=EVEN, pipeline=given) != EVEN) == moves
        assert moves or len(searched) <= 1


def test_groups_of_layers_count_as_layers() -> None:
    given, groups = pipeline(random.Random(8), interval=2), LayerGroups((0, 1, 3, 4, 6, 7))
    folded = given.folded(groups)
    assert folded.iteration_seconds([0, 2, 3, 5]) == given.iteration_seconds([0, 3, 4, 7])
    assert folded.passes is not None and given.passes is not None
    bound = folded.passes.lower_bounds(np.array([[0], [2], [3], [5]]), range(3))
    assert bound == given.passes.lower_bounds(np.array([[0], [3], [4], [7]]), range(3))


def test_where_batches_follow_each_other_that_counts() -> None:
    """With twice the memory the order in force is kept if nothing waits under it, not if a batch alone is short."""
    alone = replace(equal_layers(), memory=2.0)
    following = replace(alone, back_to_back=True)
    first, second = alone.shortest(Placement.chain(EVEN)), following.shortest(Placement.chain(EVEN))
    assert first is not None and second is not None
    assert first.iteration_seconds == second.iteration_seconds
    costs = alone.costs(Placement.chain(EVEN))
    periods = [period_seconds(one.schedule.orders, 12, costs) for one in (first, second)]
    assert periods[1] == 12 * 6.0 < periods[0]
    for present, passes in ((first, following), (second, following), (second, alone)):
        kept = replace(passes, in_force=present.schedule).shortest(Placement.chain(EVEN))
        assert kept is not None and period_seconds(kept.schedule.orders, 12, costs) == periods[1]
        assert kept.iteration_seconds == second.iteration_seconds
        assert present is first or kept == second


def test_the_iteration_of_what_is_no_partition_is_refused() -> None:
    model = pipeline(random.Random(0))
    wrong: list[Any] = [[0, 7], [0, 2, 7], [0, 2, 3, 4, 7], [0, 2, 2, 7], [0, 2, 4, 8], [[0, 2, 4, 7]] * 4]
    for seconds in (model.iteration_seconds, model.seconds_under_1f1b, model.shortest_schedule):
        for partition in wrong:
            with pytest.raises(PartitionError, match="partition"):
                pytest.fail(f"{partition}: {seconds(partition)}")
