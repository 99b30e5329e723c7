import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from ds_dynmo.partitioners import simulate


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_each_stage_runs_deepspeeds_order(num_stages: int, micro_batches: int) -> None:
    timeline = simulate([1.0] * num_stages, [1.0] * num_stages, micro_batches)
    for stage in range(num_stages):
        ours = [(kind, micro_batch) for at, micro_batch, kind, _, _ in timeline.passes if at == stage]
        assert ours == deepspeed_order(num_stages, micro_batches, stage)


def deepspeed_order(num_stages: int, micro_batches: int, stage: int) -> list[tuple[str, int]]:
    train = TrainSchedule(micro_batches=micro_batches, stages=num_stages, stage_id=stage)
    order = []
    for step, commands in enumerate(train.steps()):
        micro_batch, _ = train._step_to_micro_batch(step)
        for command in commands:
            if isinstance(command, ForwardPass | BackwardPass):
                order.append(("forward" if isinstance(command, ForwardPass) else "backward", micro_batch))
    return order
