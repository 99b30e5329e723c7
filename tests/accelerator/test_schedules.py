"""Schedules of ours between accelerators, whose messages go in one order for each two stages: bitwise as under 1F1B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.accelerator.devices import all_precisions, needs, run_on_devices, variants
from tests.support.configs import SECTION, Case
from tests.support.models import mask_layers, twofold
from tests.support.training import PROFILED, train, train_feature, train_frozen, train_layers, whole

MOVES = ([0, 2, 8], [0, 7, 8], [0, 4, 8])
FOUR = ([0, 1, 2, 4, 8], [0, 3, 5, 7, 8])


def under_both(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """What a workload gives under 1F1B and under a schedule of ours."""
    found = []
    for kind in ("1f1b", "zero_bubble"):
        SECTION["schedule"] = {"kind": kind}
        found.append(function(*args))
    return found


def check_same(ranks: int, function: Callable[..., Any], *args: Any) -> None:
    results = run_on_devices(ranks, under_both, function, args)
    stock, ours = ([rank[number] for rank in results] for number in range(2))
    assert [result["losses"] for result in ours] == [result["losses"] for result in stock]
    assert whole(ours) == whole(stock)


@needs(2)
@all_precisions
def test_two_stages_under_moves(precision: str) -> None:
    check_same(2, train, Case(precision=precision, micro_batches=6, dropout=True), MOVES, 6, 1)


@needs(2)
@variants("reentrant", [True, False], [True])
def test_recomputed_activations(reentrant: bool) -> None:
    check_same(2, train, Case(micro_batches=6, checkpoint_interval=1, reentrant=reentrant), MOVES, 4, 1)


@needs(2)
def test_dynamic_shapes() -> None:
    check_same(2, train_feature, {}, {"dynamic_shape": True}, MOVES, True)


@needs(2)
def test_a_frozen_prefix() -> None:
    check_same(2, train_frozen, Case(micro_batches=5), {1: 3, 3: 5, 5: 0}, {2: [0, 5, 8]})


@needs(4)
def test_four_stages_under_moves() -> None:
    check_same(4, train, Case(stages=4, micro_batches=10, tied=True), FOUR, 6, 1)


@needs(4)
def test_two_replicas() -> None:
    check_same(4, train, Case(replicas=2, micro_batches=6, precision="bf16 zero1", clip=0.0), MOVES, 4, 1)


@needs(4)
def test_several_tensors_between_stages() -> None:
    check_same(4, train_layers, Case(stages=4, micro_batches=6, dynmo=PROFILED), twofold, [[0, 2, 5, 6, 9]])


@needs(4)
def test_masks_between_stages() -> None:
    check_same(4, train_layers, Case(stages=4, micro_batches=6, dynmo=PROFILED), mask_layers, FOUR, 5, True)
