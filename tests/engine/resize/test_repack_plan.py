"""Which ranks stay, and which layers move, when stages leave."""

from __future__ import annotations

import itertools

import pytest
from deepspeed.runtime.pipe.topology import ProcessTopology

from ds_dynmo.engine.resize.repack_plan import RepackPlan, plan_repack
from ds_dynmo.engine.resize.world import of_stages
from ds_dynmo.placement import Placement

OLD = Placement.chain([0, 2, 4, 6, 8])


def moved(plan: RepackPlan) -> list[tuple[int, int, int]]:
    """Return layer, source and destination of each move."""
    return [(move.layer, move.source, move.destination) for move in plan.migration.moves]


def test_fewer_stages_keep_the_first_and_last_and_move_the_least() -> None:
    new = Placement.chain([0, 3, 6, 8])
    plan = plan_repack(OLD, new)
    assert (plan.staying, plan.migration.leaving, plan.placement) == ((0, 2, 3), (1,), new)
    assert moved(plan) == [(2, 1, 0), (3, 1, 2)]
    assert plan_repack(OLD, new, [1, 1, 1, 9, 1, 1, 1, 1]).staying == (0, 1, 3)
    assert plan_repack(OLD, Placement.chain([0, 8])).staying == (0,)


def test_a_v_goes_to_the_stages_that_hold_most_of_it() -> None:
    old = Placement.v([0, 1, 2, 3, 5, 6, 8])  # layers 0, 6 and 7; 1 and 5; 2, 3 and 4
    new = Placement.v([0, 2, 3, 5, 8])
    plan = plan_repack(old, new)
    assert (plan.staying, plan.migration.leaving, plan.placement) == ((0, 2), (1,), new)
    assert moved(plan) == [(1, 1, 0), (5, 1, 0)]
    chain = Placement.chain([0, 4, 8])
    plan = plan_repack(old, chain)
    assert (plan.staying, plan.placement) == ((0, 2), chain)
    assert [layer for layer, _, _ in moved(plan)] == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("axes", list(itertools.permutations(["pipe", "data", "model"])))
def test_ranks_that_stay_keep_their_replica_and_slice_and_their_order(axes: tuple[str, ...]) -> None:
    before = ProcessTopology(list(axes), [{"pipe": 4, "data": 2, "model": 3}[axis] for axis in axes])
    after, ranks = of_stages(before, [0, 2, 3])
    assert list(ranks) == sorted(ranks) and len(ranks) == after.world_size() == 18
    for new, old in enumerate(ranks):
        place = before.get_coord(old)
        assert after.get_coord(new) == place._replace(pipe=[0, 2, 3].index(place.pipe))
