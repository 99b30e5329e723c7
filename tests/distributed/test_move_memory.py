"""What stages hold while layers move: it is what is said before, and a move that does not fit is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed import move_memory_workloads as work
from tests.distributed.harness import run
from tests.distributed.workloads import Case

BESIDE = 16 << 10  # bytes that no layer holds: headers, and what the ranks tell each other
THERE_AND_BACK = [[0, 3, 12], [0, 9, 12], [0, 6, 12]]


@pytest.mark.parametrize(
    ("case", "moves"),
    [
        *[(Case(blocks=9, precision=name), THERE_AND_BACK) for name in ("fp32", "bf16", "bf16 zero1", "fp32 zero1")],
        (Case(blocks=9, precision="bf16 zero1", replicas=2, groups="two"), THERE_AND_BACK),
        (Case(blocks=9, precision="bf16 zero1 fp32sums"), THERE_AND_BACK),
        (Case(blocks=9, precision="fp32", stages=3, tied=True, groups="two"), [[0, 2, 5, 12], [0, 6, 10, 12]]),
        (Case(blocks=9, precision="bf16 zero1", stages=3, tied=True), [[0, 2, 5, 12], [0, 6, 10, 12]]),
    ],
    ids=lambda value: f"{value.precision}-{value.stages}x{value.replicas}" if isinstance(value, Case) else "",
)
def test_what_a_move_holds_is_what_is_said(case: Case, moves: Sequence[Sequence[int]]) -> None:
    for rank in run(case.ranks, work.peaks, case, moves):
        for began, peak, resting, said in rank:
            assert resting <= began <= resting + BESIDE  # of the layers, but for what the batch left
            held = peak - (began - resting)
            assert held - BESIDE <= said <= 1.05 * held


@pytest.mark.parametrize("precision", ["bf16", "bf16 zero1 fp32sums"])
def test_gradients_make_room_for_weights_and_shards(precision: str) -> None:
    case = Case(blocks=9, precision=precision)
    for rank in run(case.ranks, work.peaks, case, THERE_AND_BACK):
        before = [resting for _, _, resting, _ in rank]
        for (_, peak, _, _), old, new in zip(rank, before, before[1:]):
            assert peak <= 1.05 * max(old, new) + BESIDE  # never more than a stage holds between two moves


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
@pytest.mark.parametrize("how", ["rebalance", "shrink", "load"])
def test_a_move_that_does_not_fit_is_refused_before_a_byte_moves(how: str, precision: str, tmp_path: Path) -> None:
    case = Case(blocks=9, precision=precision, clip=0.0)
    results = run(2, work.refused, case, how, str(tmp_path))
    untouched = run(2, work.refused, case, "rebalance", str(tmp_path)) if how == "shrink" else results
    for result, other in zip(results, untouched):
        assert result["harmless"] and result["same"]
        assert all(str(number) in result["message"] for number in result["numbers"])
        assert "No layer has moved" in result["message"]
        assert result["losses"][:4] == other["losses"][:4]
    assert results[0]["message"] == results[1]["message"]
    assert results[0]["partition"] == ([0, 12] if how == "shrink" else [0, 3, 12])


def test_stages_that_would_come_back_to_too_little_memory_stay_parked() -> None:
    case = Case(blocks=9, dynmo={"interval": 0, "repack": {"release": "park"}})
    (message, stayed, partition), (recalled, there) = run(2, work.come_back, case)
    assert "bytes while layers move" in message and stayed == 1
    assert recalled and partition == there == [0, 5, 12]


def test_ranks_that_disagree_are_told_that_first() -> None:
    for message in run(2, work.disagree, 1):
        assert "every rank has to ask for the same partition" in message
