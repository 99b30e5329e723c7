"""The steps of a stage for each action of a schedule, and what it learns about its messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe import schedule as deepspeeds

from ds_dynmo.config.dynmo import ScheduleConfig
from ds_dynmo.engine.split.steps import (
    InputGradientPass,
    ScheduleInForce,
    ScheduleSteps,
    WeightGradientPass,
    with_some_split,
)
from ds_dynmo.errors import ConfigError
from ds_dynmo.schedules import (
    Schedule,
    one_f_one_b,
    schedule_for_equal_costs,
)
from tests.support.split_orders import gradient_first_1f1b, zb_h1


def names(schedule: Schedule, stage: int) -> list[str]:
    """Return the instructions with their buffers, one string per step."""
    return [
        " ".join(f"{command.name}{command.kwargs.get('buffer_id', '')}" for command in step)
        for step in ScheduleSteps(schedule, stage).steps()
    ]


def test_the_steps_of_1f1b() -> None:
    assert names(one_f_one_b(2, 2), 0) == [
        "LoadMicroBatch0 ForwardPass0 SendActivation0",
        "LoadMicroBatch1 ForwardPass1 SendActivation1",
        "RecvGrad0 BackwardPass0",
        "RecvGrad1 BackwardPass1",
        "ReduceTiedGrads ReduceGrads OptimizerStep",
    ]
    assert names(one_f_one_b(2, 2), 1) == [
        "RecvActivation0 LoadMicroBatch0 ForwardPass0",
        "BackwardPass0 SendGrad0",
        "RecvActivation0 LoadMicroBatch0 ForwardPass0",
        "BackwardPass0 SendGrad0",
        "ReduceTiedGrads ReduceGrads OptimizerStep",
    ]


def test_weight_gradients_have_a_buffer_of_their_own() -> None:
    assert names(gradient_first_1f1b(2, 1), 0) == [
        "LoadMicroBatch0 ForwardPass0 SendActivation0",
        "RecvGrad0 InputGradientPass0",
        "WeightGradientPass1",
        "ReduceTiedGrads ReduceGrads OptimizerStep",
    ]


@pytest.mark.parametrize("make", [one_f_one_b, gradient_first_1f1b, zb_h1])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (3, 5), (4, 12)])
def test_a_buffer_holds_one_micro_batch_at_a_time(make: object, stages: int, micro_batches: int) -> None:
    schedule: Schedule = make(stages, micro_batches)  # type: ignore[operator]
    for stage in range(stages):
        steps = ScheduleSteps(schedule, stage)
        held: set[int] = set()
        for step in steps.steps():
            for command in step:
                if isinstance(command, deepspeeds.ForwardPass):
                    assert command.buffer_id not in held
                    held.add(command.buffer_id)
                elif isinstance(command, deepspeeds.BackwardPass | InputGradientPass):
                    held.remove(command.buffer_id)
                elif isinstance(command, WeightGradientPass):
                    assert command.buffer_id == steps.num_pipe_buffers() - 1
                assert len(held) < steps.num_pipe_buffers()
        assert not held


def test_a_profile_splits_the_last_passes_of_stages_that_split_none() -> None:
    plain = one_f_one_b(2, 4)
    profiled = with_some_split(plain, count=1)
    assert str(profiled) == "stage 0: F0 F1 B0 F2 B1 F3 B2 I3 W3\nstage 1: F0 B0 F1 B1 F2 B2 F3 I3 W3"
    assert with_some_split(zb_h1(2, 4)) == zb_h1(2, 4)


def given(stages: int = 3, micro_batches: int = 4) -> deepspeeds.TrainSchedule:
    return deepspeeds.TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=1)


class Own(deepspeeds.TrainSchedule):  # type: ignore[misc]
    """A schedule of the user's engine."""


def test_a_schedule_takes_the_place_of_deepspeeds() -> None:
    deepspeed = given()
    assert ScheduleInForce(ScheduleConfig(kind="1f1b")).steps(deepspeed) is deepspeed
    ours = ScheduleInForce(ScheduleConfig(kind="zero_bubble"))
    assert isinstance(ours.steps(deepspeed), ScheduleSteps)
    alone = deepspeeds.TrainSchedule(micro_batches=4, stages=1, stage_id=0)
    assert ours.steps(alone) is alone


@pytest.mark.parametrize("kind", ["zero_bubble", "1f1b"])
def test_a_schedule_of_the_users_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DeepSpeed makes the steps of a batch, and where they begin; also steps put into DeepSpeed's class."""
    force = ScheduleInForce(ScheduleConfig(kind=kind))
    own = Own(micro_batches=4, stages=3, stage_id=1)
    for refuse in (force.steps, force.begin):
        with pytest.raises(ConfigError, match=r"test_schedule_steps.Own: batches run DeepSpeed's TrainSchedule or"):
            refuse(own)
    with torch.no_grad(), pytest.raises(ConfigError, match="Own: batches run DeepSpeed's InferenceSchedule"):
        force.begin(own)
    force.begin(given())
    monkeypatch.setattr(deepspeeds.TrainSchedule, "steps", lambda self: iter(()))
    with pytest.raises(
        ConfigError, match=r"schedule.TrainSchedule.steps = tests.engine.split.test_schedule_steps\..*lambda"
    ):
        force.steps(given())


def test_a_decided_schedule_applies_to_its_shape_only() -> None:
    ours = ScheduleInForce(ScheduleConfig(kind="zero_bubble"))
    ours.decide(one_f_one_b(3, 4))
    assert ours.steps(given()).schedule == one_f_one_b(3, 4)
    other = ours.steps(given(micro_batches=6)).schedule
    assert other.micro_batches == 6
    ours.decide(None)
    assert type(ours.steps(given())) is deepspeeds.TrainSchedule


def test_the_running_schedule_is_the_one_that_the_engine_got() -> None:
    ours = ScheduleInForce(ScheduleConfig(kind="zero_bubble"))
    steps = ours.steps(given())
    ours.begin(steps)
    assert ours.running is steps
    ours.begin(given())
    assert ours.running is None


def test_a_decided_schedule_is_forgotten_when_ranks_come_back() -> None:
    ours, back = (ScheduleInForce(ScheduleConfig(kind="zero_bubble")) for _ in range(2))
    ours.decide(one_f_one_b(3, 4))
    ours.forget()
    assert ours.steps(given()).schedule == back.steps(given()).schedule != one_f_one_b(3, 4)


def test_1f1b_order_runs_until_it_is_known_what_passes_hold() -> None:
    """Where memory is limited, or layers are checkpointed."""
    ours = ScheduleInForce(ScheduleConfig(kind="zero_bubble"), use_1f1b_until_decided=True)
    assert ours.steps(given()).schedule == one_f_one_b(3, 4)
    ours.decide(zb_h1(3, 4))
    assert ours.steps(given()).schedule == zb_h1(3, 4)
    assert ours.steps(given(micro_batches=6)).schedule == one_f_one_b(3, 6), "nothing was decided for these"


@pytest.mark.parametrize(
    ("memory", "synchronise", "expected"), [(1.0, False, False), (2.0, True, False), (2.0, False, True)]
)
def test_orders_count_on_the_next_batch_where_that_can_begin(memory: float, synchronise: bool, expected: bool) -> None:
    config = ScheduleConfig(kind="zero_bubble", memory=memory)
    ours = ScheduleInForce(config, stages_synchronise_per_batch=synchronise)
    assert ours.back_to_back is expected
    assert ours.schedule_for(3, 8) == schedule_for_equal_costs(3, 8, memory, back_to_back=expected)
    assert schedule_for_equal_costs(3, 8, 2.0, back_to_back=True) != schedule_for_equal_costs(3, 8, 2.0)
