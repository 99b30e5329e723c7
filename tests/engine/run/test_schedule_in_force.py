"""The schedule of the next batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deepspeed.runtime.pipe import schedule as deepspeeds

from ds_dynmo.config.dynmo import ScheduleConfig
from ds_dynmo.engine.deepspeed.instruction_map import check_steps
from ds_dynmo.engine.run.schedule_in_force import ScheduleInForce, with_some_split
from ds_dynmo.errors import ConfigError
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import PassCosts, Schedule, one_f_one_b, schedule_for_equal_costs
from tests.support.split_orders import zb_h1


def test_a_profile_splits_the_last_passes_of_stages_that_split_none() -> None:
    plain = one_f_one_b(2, 4)
    profiled = with_some_split(plain, count=1)
    assert str(profiled) == "stage 0: F0 F1 B0 F2 B1 F3 B2 I3 W3\nstage 1: F0 B0 F1 B1 F2 B2 F3 I3 W3"
    assert with_some_split(zb_h1(2, 4)) == zb_h1(2, 4)


def next_of(force: ScheduleInForce, stages: int = 3, micro_batches: int = 4) -> Schedule:
    return force.next(Placement.chain(range(stages + 1)), micro_batches).schedule


class Own(deepspeeds.TrainSchedule):  # type: ignore[misc]
    """A schedule of the user's engine."""


def test_1f1b_runs_unless_another_schedule_is_asked_for() -> None:
    assert next_of(ScheduleInForce()) == one_f_one_b(3, 4)
    ours = ScheduleInForce(ScheduleConfig(kind="zero_bubble"))
    assert next_of(ours) == ours.running == schedule_for_equal_costs(3, 4)
    assert next_of(ours, stages=1) == one_f_one_b(1, 4)


def test_a_schedule_of_the_users_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also steps put into DeepSpeed's class."""
    shape: dict[str, Any] = {"micro_batches": 4, "stages": 3, "stage_id": 1}
    with pytest.raises(ConfigError, match=r"test_schedule_in_force.Own: batches run DeepSpeed's TrainSchedule or"):
        check_steps(Own(**shape), training=True)
    with pytest.raises(ConfigError, match="Own: batches run DeepSpeed's InferenceSchedule"):
        check_steps(Own(**shape), training=False)
    check_steps(deepspeeds.TrainSchedule(**shape), training=True)
    monkeypatch.setattr(deepspeeds.TrainSchedule, "steps", lambda self: iter(()))
    with pytest.raises(
        ConfigError, match=r"schedule.TrainSchedule.steps = tests.engine.run.test_schedule_in_force\..*lambda"
    ):
        check_steps(deepspeeds.TrainSchedule(**shape), training=True)


def test_costs_order_the_messages_of_a_schedule_as_long_as_it_is_in_force() -> None:
    ours = ScheduleInForce(ScheduleConfig(kind="zero_bubble"))
    first, later = (replace(PassCosts.equal((0, 1, 2)), link_seconds=(seconds,) * 2) for seconds in (0.1, 0.2))
    in_force = []
    for schedule, costs in ((zb_h1(3, 4), first), (zb_h1(3, 4), later), (schedule_for_equal_costs(3, 4), later)):
        ours.decide(schedule, costs)
        in_force.append(ours.next(Placement.chain(range(4)), 4))
    assert in_force == [(zb_h1(3, 4), first), (zb_h1(3, 4), first), (schedule_for_equal_costs(3, 4), later)]


def test_a_decided_schedule_applies_to_its_shape_only() -> None:
    ours = ScheduleInForce(ScheduleConfig(kind="zero_bubble"))
    ours.decide(zb_h1(3, 4))
    assert next_of(ours) == zb_h1(3, 4)
    assert next_of(ours, micro_batches=6).micro_batches == 6
    ours.decide(None)
    assert next_of(ours) == one_f_one_b(3, 4)


def test_a_profile_splits_passes_whatever_was_decided() -> None:
    """Where no decision can find another order than 1F1B, none is split."""
    kinds: list[tuple[Any, int, int]] = [("auto", 3, 6), ("zero_bubble", 3, 6), ("auto", 1, 0), ("1f1b", 3, 0)]
    for kind, stages, splits in kinds:
        ours = ScheduleInForce(ScheduleConfig(kind=kind), use_1f1b_until_decided=True)
        ours.is_profiled = lambda: True
        assert next_of(ours, stages).splits == splits, kind
        ours.decide(None)
        assert next_of(ours, stages).splits == splits, kind
        ours.is_profiled = lambda: False
        assert next_of(ours, stages) == one_f_one_b(stages, 4), kind


def test_a_decided_schedule_is_forgotten_when_the_world_changes() -> None:
    ours, new = (ScheduleInForce(ScheduleConfig(kind="zero_bubble")) for _ in range(2))
    ours.decide(one_f_one_b(3, 4))
    ours.forget()
    assert next_of(ours) == next_of(new) != one_f_one_b(3, 4)


def test_1f1b_order_runs_until_it_is_known_what_passes_hold() -> None:
    """Where memory is limited, or layers are checkpointed."""
    ours = ScheduleInForce(ScheduleConfig(kind="zero_bubble"), use_1f1b_until_decided=True)
    assert next_of(ours) == one_f_one_b(3, 4)
    ours.decide(zb_h1(3, 4))
    assert next_of(ours) == zb_h1(3, 4)
    assert next_of(ours, micro_batches=6) == one_f_one_b(3, 6), "nothing was decided for these"


def test_orders_count_on_the_next_batch_where_that_can_begin() -> None:
    for memory, synchronise, expected in ((1.0, False, False), (2.0, True, False), (2.0, False, True)):
        config = ScheduleConfig(kind="zero_bubble", memory=memory)
        ours = ScheduleInForce(config, stages_synchronise_per_batch=synchronise)
        assert ours.back_to_back is expected, (memory, synchronise)
        assert next_of(ours, 3, 8) == schedule_for_equal_costs(3, 8, memory, back_to_back=expected)
    assert schedule_for_equal_costs(3, 8, 2.0, back_to_back=True) != schedule_for_equal_costs(3, 8, 2.0)
