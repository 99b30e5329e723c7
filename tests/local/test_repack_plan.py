"""Which ranks stay, and which layers move, when the number of stages changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_dynmo.engine.resize.repack_plan import JobStages, RepackPlan, between, plan_repack
from ds_dynmo.errors import PartitionError
from ds_dynmo.placement import Placement


def chain(*boundaries: int) -> Placement:
    return Placement.chain(boundaries)


FOUR = JobStages(at_work=(0, 1, 2, 3), replica_multiplier=1, parked=(), last=3)
OLD = chain(0, 2, 4, 6, 8)


def moved(plan: RepackPlan) -> list[tuple[int, int, int]]:
    """Return layer, source and destination of each move; the latter two as stages of the job."""
    return [(move.layer, plan.stages[move.source], plan.stages[move.destination]) for move in plan.migration.moves]


def test_fewer_stages_keep_the_first_and_last_and_move_the_least() -> None:
    plan = plan_repack(FOUR, OLD, chain(0, 3, 6, 8))
    assert (plan.stages, plan.staying, plan.freed, plan.placement.boundaries) == (
        (0, 1, 2, 3),
        (0, 2, 3),
        [1],
        (0, 3, 6, 8),
    )
    assert moved(plan) == [(2, 1, 0), (3, 1, 2)]
    heavy = plan_repack(FOUR, OLD, chain(0, 3, 6, 8), [1, 1, 1, 9, 1, 1, 1, 1])
    assert heavy.staying == (0, 1, 3)


def test_freed_stages_become_replicas_in_order() -> None:
    plan = plan_repack(FOUR, OLD, chain(0, 4, 8))
    assert plan.staying == (0, 3) and plan.stages_of_copies(1) == [] and plan.stages_of_copies(2) == [1, 2]


def test_parked_stages_are_recalled_the_last_first() -> None:
    one = JobStages(at_work=(0,), replica_multiplier=1, parked=(1, 2, 3), last=3)
    plan = plan_repack(one, chain(0, 8), chain(0, 4, 8))
    assert (
        plan.stages == (0, 3) and plan.migration.old.boundaries == (0, 8, 8) and plan.migration.old.empty_stages == (1,)
    )
    assert plan_repack(one, chain(0, 8), chain(0, 2, 4, 8)).stages == (0, 1, 3)


def test_parked_stages_are_of_no_use_without_the_last() -> None:
    """None of the others has read the data of the last stage."""
    assert JobStages(at_work=(0,), replica_multiplier=1, parked=(1,), last=3).most == 1
    assert JobStages(at_work=(0,), replica_multiplier=1, parked=(1, 3), last=3).most == 3


def test_extra_replicas_are_stages_of_one_pipeline_while_layers_move() -> None:
    copies = JobStages(at_work=(0, 3, 1, 2), replica_multiplier=2, parked=(), last=3)
    plan = plan_repack(copies, chain(0, 5, 8), OLD)
    assert plan.stages == (0, 1, 2, 3) and plan.migration.old.boundaries == (0, 5, 5, 5, 8) and plan.freed == []
    fewer = plan_repack(copies, chain(0, 5, 8), chain(0, 8))
    assert fewer.staying == (0,) and fewer.stages_of_copies(4) == [1, 2, 3]


def test_the_way_back_moves_nothing() -> None:
    plan = plan_repack(replace(FOUR, at_work=(0, 3), parked=(1, 2)), chain(0, 4, 8), chain(0, 2, 4, 8))
    back = between(plan.stages, plan.migration.old, chain(0, 4, 8), [0, 2])
    assert plan.stages == (0, 1, 3) and back.freed == [1] and not back.migration.moves


def test_more_stages_than_ranks_are_refused() -> None:
    with pytest.raises(PartitionError, match="repack: 5 stages, there are 1 to 4 to go on with"):
        plan_repack(FOUR, OLD, chain(0, 1, 2, 4, 6, 8))
