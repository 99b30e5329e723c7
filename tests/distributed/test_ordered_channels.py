"""Channels that post all messages of two stages in one order, over gloo: they train what 1F1B trains, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.schedule import TrainSchedule

from ds_dynmo.engine.comm.ordered_channels import OrderedChannels
from ds_dynmo.engine.split import scheduled
from ds_dynmo.schedules import FoundSchedule, PassCosts, one_f_one_b
from tests.distributed import test_instructions, test_masks, test_topologies
from tests.distributed.harness import run
from tests.distributed.support import elastic
from tests.distributed.support.configs import Case
from tests.distributed.support.training import batches, build, train, train_frozen
from tests.distributed.test_schedule_features import PROFILED, comparable, train_layers, twofold, under

MOVES = [[0, 1, 2, 4, 8], [0, 3, 5, 7, 8]]


def in_order(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Run a workload under a schedule of ours, as on an accelerator; how many batches ran so, too."""
    counts, batch = [], OrderedChannels.batch

    def counted(*given: Any) -> Any:
        counts.append(1)
        return batch(*given)

    scheduled.runs_in_order = lambda device: True
    OrderedChannels.batch = counted  # type: ignore[method-assign]
    return under("zero_bubble", function, *args)[0], sum(counts)


def decided() -> dict[str, Any]:
    """Train, decide an order and a partition from a profile, and train on."""
    engine = build(Case(stages=2, replicas=2, micro_batches=6))
    data, losses, agreed = batches(engine), [], True
    for step in range(4):
        losses.append(engine.train_batch(data).item())
        if step == 1:
            engine.rebalance()
        steps = engine.stage.schedule.running
        agreed &= steps is None or (steps.costs is not None) == (step > 1)
    return {"losses": losses, "agreed": agreed}


WORKLOADS: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
    "tuples": (4, train_layers, (Case(stages=4, micro_batches=6, dynmo=PROFILED), twofold, [[0, 2, 5, 6, 9]])),
    "masks": (
        4,
        test_topologies.train_both,
        (Case(stages=4, micro_batches=6, dynmo=PROFILED), test_topologies.mask_layers, True, MOVES),
    ),
    "masks and tables": (
        3,
        test_masks.train,
        (replace(test_masks.STAGES, micro_batches=6), "everything", test_masks.MOVES, (5,), False, test_masks.THAWED),
    ),
    "evaluations": (4, train, (Case(stages=4, micro_batches=6, precision="bf16 zero1", dropout=True), MOVES, 5, 1)),
    "dynamic shapes": (
        2,
        test_topologies.train_feature,
        ({}, {"dynamic_shape": True}, [[0, 2, 8], [0, 6, 8]], True),
    ),
    "patched instructions": (2, test_instructions.train_patched, ("ds_dynmo", Case(clip=0.0), "entries", True)),
    "a frozen prefix": (3, train_frozen, (Case(stages=3, micro_batches=5), {1: 3, 3: 5, 5: 0}, {2: [0, 1, 5, 8]})),
    "fewer stages and back": (
        3,
        elastic.train_and_repack,
        (Case(stages=3, micro_batches=4, dynmo=elastic.PARK), {2: [0, 3, 8], 3: [0, 2, 5, 8]}, 5),
    ),
    "a decision": (4, decided, ()),
    "tensor parallel": (
        4,
        test_topologies.train_sliced,
        (Case(slices=2, blocks=4, tied=True, clip=0.05, precision="bf16"), [[0, 2, 6], [0, 5, 6]]),
    ),
}


FUZZ = {"masks and tables", "tensor parallel", "patched instructions", "fewer stages and back", "tuples"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.fuzz if name in FUZZ else ()) for name in WORKLOADS]
)
def test_as_under_1f1b(name: str) -> None:
    ranks, function, args = WORKLOADS[name]
    stock = run(ranks, under, "1f1b", function, *args)
    ordered = run(ranks, in_order, function, *args)
    assert all(batches_run > 0 for _, batches_run in ordered)
    assert [comparable(found) for found, _ in ordered] == [comparable(found) for found, _ in stock]


def agreed() -> PassCosts:
    engine = build(Case(dynmo={"interval": 0, "schedule": "zero_bubble"}))
    costs = PassCosts.equal((0, 1), 1.0 + torch.distributed.get_rank())
    engine.balancer._train_by(FoundSchedule(one_f_one_b(2, engine.micro_batches), 1.0, 1.0, (1, 1)), costs)
    steps = engine.stage.schedule.steps(TrainSchedule(engine.micro_batches, 2, engine.stage_id))
    return steps.costs


def test_all_ranks_order_messages_by_the_same_costs() -> None:
    assert run(2, agreed) == [PassCosts.equal((0, 1), 1.0)] * 2
