"""1F1B, compared with DeepSpeed's own instructions."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    TrainSchedule,
)

from ds_dynmo.schedules import Action, Kind, one_f_one_b


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_each_stage_runs_deepspeeds_order(num_stages: int, micro_batches: int) -> None:
    for stage, order in enumerate(one_f_one_b(num_stages, micro_batches).orders):
        assert list(order) == deepspeed_order(num_stages, micro_batches, stage)


def deepspeed_order(num_stages: int, micro_batches: int, stage: int) -> list[Action]:
    train = TrainSchedule(micro_batches=micro_batches, stages=num_stages, stage_id=stage)
    order = []
    for step, commands in enumerate(train.steps()):
        micro_batch, _ = train._step_to_micro_batch(step)
        for command in commands:
            if isinstance(command, ForwardPass | BackwardPass):
                kind = Kind.FORWARD if isinstance(command, ForwardPass) else Kind.BACKWARD
                order.append(Action(kind, stage, micro_batch))
    return order
