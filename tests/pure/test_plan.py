"""Plans validate themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.plan import LayerMove, MigrationPlan, check_partition, stage_of


def test_a_partition_becomes_plain_ints() -> None:
    assert check_partition([0, np.int64(3), 8], 8, 2) == (0, 3, 8)
    assert all(type(bound) is int for bound in check_partition([0, np.int64(3), 8], 8, 2))


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([0, 8], "has 2 boundaries, 2 stages need 3"),
        ([0, 3, 7], "8 layers need 0 to 8"),
        ([1, 3, 8], "runs from 1"),
        ([0, 0, 8], "stage 0 would own no layer"),
        ([0, 8, 8], "stage 1 would own no layer"),
        ([0, 9, 8], "not strictly increasing"),
        ([0, 2.5, 8], "list of ints"),
        ("abc", "list of ints"),
        (None, "list of ints"),
    ],
)
def test_what_is_no_partition(partition: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        check_partition(partition, 8, 2)


def test_moves_between_partitions() -> None:
    plan = MigrationPlan.between([0, 2, 4, 6], [0, 3, 5, 6])
    assert plan.moves == (LayerMove(2, 1, 0), LayerMove(4, 2, 1))
    assert MigrationPlan.between([0, 2, 4], [0, 2, 4]).moves == ()
    assert stage_of(4, plan.new) == 1


def test_a_plan_with_other_moves_is_refused() -> None:
    with pytest.raises(PartitionError, match="do not lead"):
        MigrationPlan((0, 2, 4), (0, 3, 4), ())


def test_digests_tell_plans_apart() -> None:
    digests = {MigrationPlan.between([0, 2, 6], [0, stop, 6]).digest for stop in range(1, 6)}
    assert len(digests) == 5
    assert MigrationPlan.between([0, 2, 6], [0, 3, 6]).digest == MigrationPlan.between((0, 2, 6), (0, 3, 6)).digest
