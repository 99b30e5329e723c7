"""The rounds in which layers stream."""

from __future__ import annotations

import random

import pytest

from ds_dynmo.partitioners import rounds
from ds_dynmo.plan import LayerMove, MigrationPlan


def test_a_stage_sends_one_and_receives_one_at_a_time() -> None:
    moves = [LayerMove(2, 0, 1), LayerMove(3, 0, 1), LayerMove(5, 1, 2)]
    assert [[move.layer for move in each] for each in rounds(moves)] == [[2, 5], [3]]


@pytest.mark.parametrize("seed", range(20))
def test_every_move_is_in_one_round(seed: int) -> None:
    chooser = random.Random(seed)
    bounds = [[0, *sorted(chooser.sample(range(1, 20), 4)), 20] for _ in range(2)]
    moves = MigrationPlan.between(*bounds).moves
    found = rounds(moves)
    assert sorted(move.layer for each in found for move in each) == sorted(move.layer for move in moves)
    for each in found:
        assert len({move.source for move in each}) == len({move.destination for move in each}) == len(each)
