"""The simulator of schedules."""

import random
from typing import Any

import pytest

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules import (
    Action,
    Kind,
    PassCosts,
    Schedule,
    ScheduleTimeline,
    best_schedule,
    one_f_one_b,
    replay,
)
from tests.schedules.instances import random_instance
from tests.support.split_orders import zb_h1


def starts_of(timeline: ScheduleTimeline) -> dict[Action, float]:
    orders = zip(timeline.schedule.orders, timeline.start_seconds, strict=True)
    return {action: start for order, starts in orders for action, start in zip(order, starts, strict=True)}


def test_busy_and_idle() -> None:
    timeline = replay(one_f_one_b(2, 3), PassCosts.chain([1, 2], [0.5, 1], [0.5, 1]))
    assert timeline.iteration_seconds == 14.0
    assert timeline.busy_seconds == (6.0, 12.0)
    assert timeline.stage_bubble_ratios == (8 / 14, 2 / 14)
    assert timeline.bubble_ratio == pytest.approx(10 / 28)
    assert replay(one_f_one_b(1, 1), PassCosts.equal([0], 0.0)).bubble_ratio == 0.0


def test_each_kind_of_pass_takes_its_own_seconds() -> None:
    costs = PassCosts.chain([1.0, 2.0], [3.0, 5.0], [7.0, 11.0], [9.0, 15.0])
    assert replay(one_f_one_b(2, 1), costs).iteration_seconds == 1 + 2 + 15 + 9
    timeline = replay(zb_h1(2, 1), costs)
    assert timeline.end_seconds == ((1.0, 11.0, 18.0), (3.0, 8.0, 19.0))


def test_every_pass_starts_when_its_stage_is_free_and_its_data_has_arrived() -> None:
    rng = random.Random(1)
    for _ in range(20):
        costs, micro_batches, sizes, limits = random_instance(rng, most_stages=6)
        found = best_schedule(costs, micro_batches, sizes, limits).schedule
        timeline = replay(rng.choice([found, one_f_one_b(costs.num_stages, micro_batches)]), costs)
        starts = starts_of(timeline)
        ends = {action: start + costs.by_kind[action.kind][action.chunk] for action, start in starts.items()}

        def gradient_end(chunk: int, micro_batch: int, ends: dict[Action, float] = ends) -> float:
            kinds = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
            return next(ends[Action(k, chunk, micro_batch)] for k in kinds if Action(k, chunk, micro_batch) in ends)

        for order in timeline.schedule.orders:
            free_at = 0.0
            for action in order:
                kind, chunk, micro_batch = action
                arrived = 0.0
                if kind == Kind.FORWARD and chunk > 0:
                    arrived = ends[Action(kind, chunk - 1, micro_batch)] + costs.link_seconds[chunk - 1]
                elif kind in (Kind.INPUT_GRADIENT, Kind.BACKWARD):
                    arrived = ends[Action(Kind.FORWARD, chunk, micro_batch)]
                    if costs.frozen_chunks <= chunk < costs.num_chunks - 1:
                        arrived = max(arrived, gradient_end(chunk + 1, micro_batch) + costs.link_seconds[chunk])
                assert starts[action] == max(free_at, arrived)
                free_at = ends[action]
        assert timeline.iteration_seconds == max(ends.values())
        seconds = [sum(costs.by_kind[one.kind][one.chunk] for one in order) for order in timeline.schedule.orders]
        assert timeline.busy_seconds == pytest.approx(seconds)


def test_links_cost_between_stages_only() -> None:
    v = PassCosts((0, 1, 1, 0), (1.0,) * 4, (1.0,) * 4, (0.0,) * 4, (1.0,) * 4, (0.5, 0.5, 0.5))
    assert v.link_seconds == (0.5, 0.0, 0.5)
    F, B = Kind.FORWARD, Kind.BACKWARD
    orders = tuple(
        tuple(Action(k, c, 0) for k, c in order)
        for order in (((F, 0), (F, 3), (B, 3), (B, 0)), ((F, 1), (F, 2), (B, 2), (B, 1)))
    )
    assert replay(Schedule((0, 1, 1, 0), 1, orders), v).iteration_seconds == 8 + 4 * 0.5


def test_frozen_chunks_wait_for_no_gradient() -> None:
    forward, backward = [1.0, 1.0], [0.0, 2.0]
    waiting = replay(one_f_one_b(2, 4), PassCosts.chain(forward, backward, [0, 0]))
    frozen = replay(one_f_one_b(2, 4), PassCosts.chain(forward, backward, [0, 0], frozen_chunks=1))
    assert waiting.end_seconds[0] == (1, 2, 4, 5, 7, 8, 10, 13)
    assert frozen.end_seconds[0] == (1, 2, 2, 3, 3, 4, 4, 4)
    assert frozen.iteration_seconds == 13.0


def test_invalid_costs_are_refused() -> None:
    refusals: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (([1, 1], [1, 1], [1], [1, 1]), {}, "2 chunks need 2 weight_gradient_seconds, got 1"),
        (([1, float("nan")], [1, 1], [1, 1]), {}, r"forward_seconds\[1\] is nan"),
        (([1, 1],) * 3, {"link_seconds": [0.1, 0.1]}, "2 chunks need 1 link_seconds, got 2"),
        (([1, 1],) * 3, {"frozen_chunks": 1}, "chunk 0 of 1 frozen ones has backward seconds"),
    ]
    for costs, options, words in refusals:
        with pytest.raises(ScheduleError, match=words):
            pytest.fail(f"{words}: {PassCosts.chain(*costs, **options)}")
    with pytest.raises(ScheduleError, match=r"chunks on stages \[0, 1\], the costs for \[0, 1, 2\]"):
        replay(one_f_one_b(2, 2), PassCosts.equal(range(3)))
