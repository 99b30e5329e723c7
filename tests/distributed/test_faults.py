"""A failure at any step of a rebalance, on any rank: before bytes move nobody is harmed, after that all stop."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import fault_workloads as workloads
from tests.distributed.harness import RankError, run
from tests.distributed.test_bitwise import whole
from tests.distributed.workloads import Case

BLOCK: dict[str, Any] = {"interval": 0, "timeout_seconds": 10, "profile": {"batches": 1, "warmup_batches": 0}}
CASES = {
    "fp32": Case(stages=3, start=(0, 3, 5, 8), dynmo=BLOCK),
    "bf16 zero1": Case(stages=3, start=(0, 3, 5, 8), dynmo=BLOCK, precision="bf16 zero1", groups="two"),
}


def grid(points: Any) -> list[Any]:
    """Every point on every rank; the short form takes one rank and lets the wrapper take turns."""
    return [
        pytest.param(
            point, rank, precision, id=f"{point}-rank{rank}-{precision}", marks=() if short else pytest.mark.fuzz
        )
        for number, point in enumerate(points)
        for rank in range(3)
        for turn, precision in enumerate(CASES)
        for short in [rank == number % 3 and turn == number % 2]
    ]


@pytest.mark.parametrize(("point", "rank", "precision"), grid(workloads.HARMLESS))
def test_before_bytes_move_training_goes_on(point: str, rank: int, precision: str) -> None:
    results = run(3, workloads.harmless, CASES[precision], point, rank)
    assert all("No layer has moved" in result["message"] for result in results)
    expected = run(3, workloads.unharmed, CASES[precision], rank)
    assert [result["losses"] for result in results] == [result["losses"] for result in expected]
    assert whole(results) == whole(expected)


@pytest.mark.parametrize(("point", "rank", "precision"), grid(workloads.FATAL))
def test_after_that_every_rank_stops_and_says_where(point: str, rank: int, precision: str) -> None:
    messages = run(3, workloads.fatal, CASES[precision], point, rank, seconds=60)
    assert "the cable is gone" in messages[rank]
    for number, message in enumerate(messages):
        assert f"rank {number} failed " in message and "resume the job from its last checkpoint" in message


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 3 else pytest.mark.fuzz) for s in range(20)])
def test_a_killed_job_resumes_bitwise(tmp_path: Path, seed: int) -> None:
    """SIGKILL at any moment of a run that rebalances after every batch: before, in, and between saves."""
    chooser = random.Random(seed)
    case = Case(stages=2, precision=chooser.choice(["fp32", "bf16 zero1"]), groups="two", dropout=True, start=(0, 3, 8))
    whole_run = run(2, workloads.train_and_save, case, str(tmp_path / "whole"), -1, 0)
    try:
        run(
            2,
            workloads.train_and_save,
            case,
            str(tmp_path / "killed"),
            chooser.randint(0, 1),
            chooser.randint(1, 400_000),
        )
    except RankError as error:
        assert "died" in str(error) or "Connection" in str(error)
    stages = chooser.choice([1, 2])
    case = replace(case, stages=stages, start=None if stages == 1 else case.start)
    resumed = run(stages, workloads.resume, case, str(tmp_path / "killed"))
    expected = whole_run[0]["losses"]
    assert resumed[0]["losses"] == {step: expected[step] for step in resumed[0]["losses"]}
    assert whole(resumed) == whole(whole_run)
