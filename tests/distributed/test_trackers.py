"""Dropout under a tracker's ``fork()`` in a tensor-parallel layer is its own and its slice's, on any stage."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.distributed import tracker_workloads as workloads
from tests.distributed.harness import run
from tests.distributed.test_bitwise import whole
from tests.distributed.tracker_workloads import OF_ALL, OF_SLICE
from tests.distributed.workloads import Case

MOVES = ([0, 1, 7], [0, 6, 7], [0, 2, 7], [0, 5, 7])
SLICED = Case(slices=2)


@cache
def still(which: str) -> list[dict[str, Any]]:
    return run(4, workloads.train, SLICED, which)


def drawn(results: list[dict[str, Any]], index: int, name: str | None = None) -> set[tuple[int, str, float]]:
    """By a slice, on all stages; ``name``: from this state only."""
    of_slice = [result["drawn"] for result in results if result["slice"] == index]
    return {draw for found in of_slice for draw in found if name in (None, draw[1])}


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [result["losses"] for result in found] == [result["losses"] for result in expected]
    assert whole(found) == whole(expected)
    assert all(drawn(found, index) == drawn(expected, index) for index in range(2))
    assert all(result["kept"] for result in found)


@pytest.mark.parametrize("which", ["deepspeed", "megatron", "own"])
def test_moves_change_nothing(which: str) -> None:
    check_same(run(4, workloads.train, SLICED, which, MOVES), still(which))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_repeats_the_draws(reentrant: bool) -> None:
    case = Case(slices=2, checkpoint_interval=1, reentrant=reentrant)
    check_same(run(4, workloads.train, case, "deepspeed", MOVES), still("deepspeed"))


def test_a_layer_that_checkpoints_itself_repeats_its_draws() -> None:
    check_same(run(4, workloads.train, SLICED, "deepspeed", MOVES, True), still("deepspeed"))


@pytest.mark.parametrize("which", ["deepspeed", "megatron", "own"])
def test_slices_draw_alike_where_their_states_are_alike_only(which: str) -> None:
    results = still(which)
    assert drawn(results, 0, OF_ALL) == drawn(results, 1, OF_ALL)
    one, other = drawn(results, 0, OF_SLICE), drawn(results, 1, OF_SLICE)
    assert len(one) == len(other) == len({value for _, _, value in one | other}) / 2
    assert not {value for _, _, value in one} & {value for _, _, value in drawn(results, 0, OF_ALL)}


def test_the_number_of_stages_changes_nothing() -> None:
    whole_model = run(2, workloads.train, Case(stages=1, slices=2), "megatron")
    assert whole(whole_model) == whole(still("megatron"))
    assert all(drawn(whole_model, index) == drawn(still("megatron"), index) for index in range(2))


def test_without_streams_they_are_the_ranks() -> None:
    case = Case(slices=2, dynmo={"interval": 0, "randomness": {"per_layer": False}})
    stays, moves = (run(4, workloads.train, case, "deepspeed", moves) for moves in ((), MOVES))
    assert stays[0]["losses"] != moves[0]["losses"]
    assert not any(result["kept"] for result in stays)


def test_trackers_that_do_not_tell_their_states_are_refused() -> None:
    for early, own, late in run(2, workloads.closed_trackers):
        assert f"random states of {workloads.MEGATRON} (Closed) cannot be enumerated" in early
        assert "it has no get_states and no set_states" in early and late == early
        assert "random states of mine (Closed)" in own
