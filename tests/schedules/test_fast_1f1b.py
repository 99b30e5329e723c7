"""The fast case of the simulator, DeepSpeed's 1F1B, and that it equals the general one."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules import (
    Action,
    Kind,
    PassCosts,
    ScheduleTimeline,
    iteration_seconds,
    one_f_one_b,
    replay,
    simulate,
)


class Pass(NamedTuple):
    stage: int
    action: Action
    start: float
    end: float


def passes(timeline: ScheduleTimeline) -> Iterator[Pass]:
    rows = zip(timeline.schedule.orders, timeline.start_seconds, timeline.end_seconds, strict=True)
    for stage, row in enumerate(rows):
        yield from (Pass(stage, *one) for one in zip(*row, strict=True))


def named(timeline: ScheduleTimeline, stage: int) -> list[tuple[str, float]]:
    return [(f"{kind.letter}{number}", start) for at, (kind, _, number), start, _ in passes(timeline) if at == stage]


def test_two_stages_three_micro_batches() -> None:
    # seconds   0   1   2   3   4   5   6   7
    # stage 0   F0  F1  .   B0  F2  B1  .   B2
    # stage 1   .   F0  B0  F1  B1  F2  B2  .
    timeline = simulate([1.0, 1.0], [1.0, 1.0], micro_batches=3)
    assert named(timeline, 0) == [("F0", 0.0), ("F1", 1.0), ("B0", 3.0), ("F2", 4.0), ("B1", 5.0), ("B2", 7.0)]
    assert named(timeline, 1) == [("F0", 1.0), ("B0", 2.0), ("F1", 3.0), ("B1", 4.0), ("F2", 5.0), ("B2", 6.0)]
    assert timeline.iteration_seconds == 8.0
    assert timeline.busy_seconds == (6.0, 6.0)
    assert timeline.bubble_ratio == 0.25
    assert next(passes(timeline)) == (0, Action(Kind.FORWARD, 0, 0), 0.0, 1.0)


def test_even_stages_take_the_textbook_time_and_hold_what_the_memory_model_says() -> None:
    for stages, micro_batches in itertools.product(range(1, 6), range(1, 8)):
        timeline = simulate([1.0] * stages, [2.0] * stages, micro_batches)
        assert timeline.iteration_seconds == 3.0 * (micro_batches + stages - 1)
        held, most = [0] * stages, [0] * stages
        for stage, action, _, _ in passes(timeline):
            held[stage] += 1 if action.kind == Kind.FORWARD else -1
            most[stage] = max(most[stage], held[stage])
        assert most == [min(stages - stage, micro_batches) for stage in range(stages)]


def test_links_count_and_may_differ_and_wrong_sizes_are_refused_with_the_numbers() -> None:
    assert simulate([1.0] * 4, [2.0] * 4, 1, link_seconds=0.25).iteration_seconds == 12.0 + 6 * 0.25
    assert simulate([1.0] * 3, [2.0] * 3, 1, [0.25, 0.5]).iteration_seconds == 9.0 + 2 * 0.75
    refusals: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
        (simulate, ([1.0, 1.0], [1.0], 4), "2 chunks need 2 input_gradient_seconds, got 1"),
        (simulate, ([1.0], [1.0], 0), "at least 1 micro-batch, got 0"),
        (simulate, ([-1.0], [1.0], 1), r"forward_seconds\[0\] is -1.0"),
        (simulate, ([1.0] * 3, [1.0] * 3, 1, [0.1, 0.1, 0.1]), "3 chunks need 2 link_seconds, got 3"),
        (iteration_seconds, ([1.0] * 3, [1.0] * 3, 1, [0.1]), "3 stages have 2 links between them, got 1"),
    ]
    for function, values, words in refusals:
        with pytest.raises(ScheduleError, match=words):
            pytest.fail(f"{words}: {function(*values)}")


def test_the_bubble_of_each_stage() -> None:
    timeline = simulate([1.0, 2.0], [1.0, 2.0], micro_batches=3)
    assert timeline.iteration_seconds == 14.0
    assert timeline.stage_bubble_ratios == pytest.approx((1 - 6 / 14, 1 - 12 / 14))
    assert sum(timeline.stage_bubble_ratios) / 2 == pytest.approx(timeline.bubble_ratio)
    assert simulate([0.0], [0.0], 1).stage_bubble_ratios == (0.0,)


def test_many_pipelines_at_once_equal_the_simulator_of_any_schedule_to_the_bit() -> None:
    rng = random.Random(11)
    for _ in range(80):
        num_stages, micro_batches, pipelines = rng.randint(1, 9), rng.randint(1, 14), rng.randint(1, 3)
        forward, backward = (
            [[rng.choice([0.0, rng.uniform(0.1, 2)]) for _ in range(pipelines)] for _ in range(num_stages)]
            for _ in range(2)
        )
        links = [rng.choice([0.0, rng.uniform(0, 0.5)]) for _ in range(num_stages - 1)]
        schedule = one_f_one_b(num_stages, micro_batches)
        together = iteration_seconds(forward, backward, micro_batches, links)
        for place in range(pipelines):
            ahead, back = ([row[place] for row in rows] for rows in (forward, backward))
            costs = PassCosts.chain(ahead, back, [0.0] * num_stages, back, links)
            assert replay(schedule, costs).iteration_seconds == together[place]
            assert iteration_seconds(ahead, back, micro_batches, links) == together[place]
        same_link = [iteration_seconds(forward, backward, micro_batches, link) for link in (0.25, [0.25] * len(links))]
        assert (same_link[0] == same_link[1]).all()
