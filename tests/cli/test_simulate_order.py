"""The simulated schedule, compared with DeepSpeed's own instructions."""

from __future__ import annotations

import random

import pytest
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TrainSchedule,
)

from ds_dynmo.schedules import Action, Kind, simulate
from ds_dynmo.schedules.fast_1f1b import Sends

NAMES = {
    ForwardPass: "forward",
    BackwardPass: "backward",
    SendActivation: "send to next",
    RecvActivation: "receive from previous",
    SendGrad: "send to previous",
    RecvGrad: "receive from next",
}


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_each_stage_runs_deepspeeds_order(num_stages: int, micro_batches: int) -> None:
    timeline = simulate([1.0] * num_stages, [1.0] * num_stages, micro_batches)
    for stage in range(num_stages):
        assert list(timeline.schedule.orders[stage]) == deepspeed_order(num_stages, micro_batches, stage)


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


@pytest.mark.parametrize("sends", ["buffered", "rendezvous"])
def test_carrying_out_deepspeeds_instructions_takes_the_simulated_time(sends: Sends) -> None:
    rng = random.Random(5)
    for _ in range(150):
        num_stages, micro_batches = rng.randint(1, 6), rng.randint(1, 8)
        forward, backward = ([rng.uniform(0.1, 2) for _ in range(num_stages)] for _ in range(2))
        links = [rng.choice([0.0, 0.2, 1.0]) for _ in range(num_stages - 1)]
        expected = carry_out(forward, backward, micro_batches, links, sends)
        timeline = simulate(forward, backward, micro_batches, links, sends=sends)
        assert timeline.iteration_seconds == expected  # to the bit


def carry_out(forward: list[float], backward: list[float], micro_batches: int, links: list[float], sends: str) -> float:
    """Run each stage's instructions. Messages between two stages arrive in the order in which they are sent."""
    num_stages = len(forward)
    schedules = [TrainSchedule(micro_batches, num_stages, stage) for stage in range(num_stages)]
    todo = [
        [NAMES[type(command)] for step in schedule.steps() for command in step if type(command) in NAMES]
        for schedule in schedules
    ]
    clock = [0.0] * num_stages
    sent: dict[tuple[int, int], list[float]] = {}
    progress = True
    while progress:
        progress = False
        for stage in range(num_stages):
            while todo[stage]:
                name = todo[stage][0]
                if name in ("forward", "backward"):
                    clock[stage] += (forward if name == "forward" else backward)[stage]
                else:
                    peer = stage + (1 if name.endswith("next") else -1)
                    link = links[min(stage, peer)]
                    if name.startswith("send"):
                        if sends == "buffered":
                            sent.setdefault((stage, peer), []).append(clock[stage] + link)
                        else:  # both sides run at once
                            other = "receive from " + ("previous" if peer > stage else "next")
                            if not todo[peer] or todo[peer][0] != other:
                                break
                            clock[stage] = clock[peer] = max(clock[stage], clock[peer]) + link
                            todo[peer].pop(0)
                    elif not sent.get((peer, stage)):
                        break
                    else:
                        clock[stage] = max(clock[stage], sent[peer, stage].pop(0))
                todo[stage].pop(0)
                progress = True
    assert not any(todo)
    return max(clock)
