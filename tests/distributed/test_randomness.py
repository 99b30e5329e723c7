"""A run that draws random numbers in its layers is bitwise the same wherever its layers are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import randomness_workloads as workloads
from tests.distributed.harness import run
from tests.distributed.randomness_workloads import Plan
from tests.distributed.test_bitwise import whole
from tests.distributed.workloads import Case

NEVER_PROFILED: dict[str, Any] = {"enabled": False}
MOVES = Plan(moves=((0, 1, 8), (0, 7, 8), (0, 2, 8), (0, 5, 8)))


@cache
def still(stages: int = 2, tied: bool = False, replicas: int = 1) -> list[dict[str, Any]]:
    """A run without checkpointing, profile or move."""
    case = Case(stages=stages, tied=tied, replicas=replicas, dynmo=NEVER_PROFILED)
    return run(case.ranks, workloads.train, case)


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [result["losses"] for result in found] == [result["losses"] for result in expected]
    assert whole(found) == whole(expected)
    assert all(result["generators kept"] for result in found)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("interval", [1, 2])
def test_moves_and_recomputation_change_nothing(interval: int, reentrant: bool) -> None:
    moved = run(2, workloads.train, Case(checkpoint_interval=interval, reentrant=reentrant), MOVES)
    assert moved[0]["moved"] > 0
    check_same(moved, still())


@pytest.mark.parametrize("tied", [False, True])
def test_moves_change_nothing(tied: bool) -> None:
    moves = Plan(moves=((0, 1, 2, 8), (0, 6, 7, 8), (0, 2, 5, 8)))
    moved = run(3, workloads.train, Case(stages=3, tied=tied), moves)
    assert moved[0]["moved"] > 0
    check_same(moved, still(stages=3, tied=tied))


def test_the_number_of_stages_changes_nothing() -> None:
    assert still(stages=3)[0]["losses"] == still()[0]["losses"]
    assert whole(still(stages=3)) == whole(still())


def test_replicas_draw_numbers_of_their_own() -> None:
    moved = run(4, workloads.train, Case(replicas=2, checkpoint_interval=1), MOVES)
    assert moved[0]["moved"] > 0
    check_same(moved, still(replicas=2))


@pytest.mark.parametrize("interval", [0, 2])
def test_profiled_batches_draw_the_same(interval: int) -> None:
    block = {"interval": 0, "profile": {"batches": 99, "warmup_batches": 0}}
    profiled = run(2, workloads.train, Case(dynmo=block, checkpoint_interval=interval), MOVES)
    check_same(profiled, still())
    assert [result["profiled"] for result in [*profiled, *still()]] == [2, 2, 0, 0]  # since the last move


def test_evaluations_change_no_training_and_are_the_same_after_a_move() -> None:
    evaluate = Plan(evaluate_after=(1, 4))
    stays = run(2, workloads.train, Case(dynmo=NEVER_PROFILED), evaluate)
    moves = run(2, workloads.train, Case(), replace(MOVES, evaluate_after=(1, 4)))
    check_same(stays, still())
    check_same(moves, still())
    assert len(stays[0]["evaluations"]) == 2
    assert [result["evaluations"] for result in stays] == [result["evaluations"] for result in moves]


def test_a_resumed_run_draws_on(tmp_path: Path) -> None:
    saved = run(2, workloads.train, Case(), Plan(save_to=str(tmp_path)))
    resumed = run(2, workloads.train, Case(), Plan(resume_from=str(tmp_path), moves=((0, 2, 8), (0, 5, 8))))
    assert [result["losses"][3:] for result in saved] == [result["losses"] for result in resumed]
    assert whole(saved) == whole(resumed) == whole(still())


def test_streams_go_before_deepspeeds_seed_layers() -> None:
    seeded = run(2, workloads.train, Case(checkpoint_interval=1), replace(MOVES, seed_layers=True))
    assert [result["losses"] for result in seeded] == [result["losses"] for result in still()]
    assert whole(seeded) == whole(still())


def test_the_seed_is_the_modules_unless_the_configuration_has_one() -> None:
    same, other = (
        run(2, workloads.train, Case(dynmo={"interval": 0, "randomness": {"seed": seed}})) for seed in (1234, 1235)
    )
    check_same(same, still())
    assert other[0]["losses"] != still()[0]["losses"]


def test_without_streams_a_move_changes_the_draws() -> None:
    case = Case(dynmo={"interval": 0, "randomness": {"per_layer": False}})
    stays, moves = (run(2, workloads.train, case, plan) for plan in (Plan(), replace(MOVES, moves=MOVES.moves[:1])))
    assert stays[0]["losses"][0] != still()[0]["losses"][0]
    assert stays[0]["losses"] != moves[0]["losses"]
    assert not stays[0]["generators kept"]
