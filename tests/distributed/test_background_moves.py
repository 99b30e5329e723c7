"""Moves while a batch trains: a run with them equals one without, to the bit."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_each
from tests.distributed.support.configs import PRECISIONS, Case
from tests.distributed.support.training import check_moves_changed_nothing, partitions, train


def check_same(case: Case, moves: list[list[int]], steps: int = 7, every: int = 2) -> None:
    still, moved = run_each(case.ranks, train, (case, [], steps, every), (case, moves, steps, every, True))
    assert [r["evaluations"] for r in moved] == [r["evaluations"] for r in still]
    assert [r["partition"] for r in moved] == [moves[-1]] * case.ranks
    check_moves_changed_nothing(still, moved)


@pytest.mark.every_variant
@pytest.mark.parametrize("precision", PRECISIONS)
def test_moves_change_nothing(precision: str) -> None:
    case = Case(stages=3, precision=precision, replicas=1 + ("zero1" in precision), groups="two", tied=True)
    check_same(case, partitions(case, seed=3, count=3))
