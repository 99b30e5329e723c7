"""Freed ranks as further data-parallel replicas: bitwise as a job that was launched so, from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed import replica_workloads
from tests.distributed.harness import run
from tests.distributed.test_repack import losses, merged
from tests.distributed.workloads import Case

BY_HAND = {"interval": 0, "repack": {"freed_ranks": "replicas", "release": "park"}}


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("fp32", 1),
        ("bf16 zero1", 1),
        pytest.param("bf16", 1, marks=pytest.mark.fuzz),
        pytest.param("fp32", 2, marks=pytest.mark.fuzz),
        pytest.param("bf16 zero1", 2, marks=pytest.mark.fuzz),
    ],
)
def test_freed_stages_are_replicas(tmp_path: Path, precision: str, replicas: int) -> None:
    """4 stages, then 2 in two copies, 1 in four, 4 again: as launched at each of these sizes."""
    case = Case(
        stages=4,
        replicas=replicas,
        precision=precision,
        micro_batches=4,
        tied=True,
        groups="two",
        scheduler=True,
        dynmo=BY_HAND,
    )
    folded = run(case.ranks, replica_workloads.train, case, {2: 2, 4: 1, 6: 4}, 8)
    first, expected = 0, {}
    for last, stages in [(2, 4), (4, 2), (6, 1), (8, 4)]:
        copies = 4 // stages
        launched = replace(case, stages=stages, replicas=replicas * copies, micro_batches=4 // copies)
        end = run(case.ranks, replica_workloads.train_as_launched, launched, str(tmp_path), first, last, replicas)
        expected.update(losses(end))
        first = last
    assert losses(folded) == expected
    assert merged(folded) == merged(end)
    of_one = replicas
    assert folded[0]["shapes"][1::2] == [(2, 2 * of_one, 2), (1, 4 * of_one, 1), (4, of_one, 4), (4, of_one, 4)]
    reports = folded[0]["reports"]
    assert [report.copies for report in reports] == [2, 4, 1]
    assert not any(report.released_ranks or report.recalled_ranks for report in reports)
