"""Moves and re-packing between accelerators change no bit, and a released stage leaves nothing on its device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.accelerator.devices import ACCELERATOR, all_precisions, each, needs, run_on_devices, variants
from tests.support import case_runs
from tests.support.case_runs import CASES, CaseRun, moved
from tests.support.configs import Case
from tests.support.elastic import losses, merged, train_alone, train_and_repack
from tests.support.training import batches, build, train, whole

MOVES = ([0, 2, 8], [0, 7, 8], [0, 1, 8], [0, 4, 8])


def check_moves(case: Case, moves: Any) -> None:
    """Compare runs with a move after every batch and without moves, under 1F1B with six micro-batches."""
    ranks = run_on_devices(case.ranks, each, train, ((case, (), 6, 1), (case, moves, 6, 1)))
    still, on_the_move = ([rank[run] for rank in ranks] for run in range(2))
    assert on_the_move[0]["moved"] > 0 and on_the_move[0]["partition"] == list(moves[-1])
    for name in ("losses", "evaluations"):
        assert [result[name] for result in on_the_move] == [result[name] for result in still]
    assert whole(on_the_move) == whole(still)


@needs(2)
@all_precisions
def test_moves_change_nothing(precision: str) -> None:
    check_moves(Case(stages=2, precision=precision, micro_batches=6, dropout=True), MOVES)


@needs(2)
def test_tied_layers_come_to_one_stage_and_part() -> None:
    check_moves(Case(stages=2, tied=True, micro_batches=6), MOVES)


@needs(4)
def test_moves_of_two_replicas_change_nothing() -> None:
    check_moves(Case(stages=2, replicas=2, precision="bf16 zero1", micro_batches=6, clip=0.0), MOVES)


@needs(4)
def test_moves_over_four_stages_change_nothing() -> None:
    check_moves(Case(stages=4, micro_batches=6), ([0, 1, 2, 3, 8], [0, 5, 6, 7, 8], [0, 2, 4, 6, 8]))


@needs(2)
@pytest.mark.parametrize("name", CASES)
def test_moves_change_nothing_in_any_case(name: str) -> None:
    still = CaseRun(CASES[name])
    ranks = run_on_devices(2, each, case_runs.train, ((still,), (moved(still),)))
    at_rest, on_the_move = ([rank[run] for rank in ranks] for run in range(2))
    assert [result["losses"] for result in at_rest] == [result["losses"] for result in on_the_move]
    assert whole(at_rest) == whole(on_the_move)


@needs(2)
@variants("precision", ["fp32", "bf16 zero1"], ["bf16 zero1"])
def test_fewer_ranks_train_as_all_would(precision: str) -> None:
    """2 -> 1 stages equal a run without re-packing."""
    clip = 0.0 if "zero1" in precision else 1.0  # ZeRO sums the norm over its shards, which differ between stages
    case = Case(stages=2, precision=precision, dropout=True, clip=clip)
    fewer = run_on_devices(2, train_and_repack, case, {2: 1}, 4)
    stayed = run_on_devices(2, train_alone, case, 4)
    assert losses(fewer) == losses(stayed) and merged(fewer) == merged(stayed)


def release() -> tuple[bool, int, int]:
    """Return whether this rank was released, and the bytes allocated on its device before and after."""
    engine = build(Case(stages=2, blocks=40))
    data = batches(engine)
    engine.train_batch(data)
    before = ACCELERATOR.memory_allocated()
    engine.repack(1)
    after, released = ACCELERATOR.memory_allocated(), bool(engine.released)
    if not released:
        engine.train_batch(data)
    return released, before, after


@needs(2)
def test_a_released_stage_leaves_nothing_on_its_device() -> None:
    staying, leaving = run_on_devices(2, release)
    assert not staying[0] and staying[2] > staying[1]
    assert leaving[0] and leaving[2] < 0.05 * leaving[1]
