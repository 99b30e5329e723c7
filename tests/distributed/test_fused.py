"""Optimizers whose count of steps is on the accelerator: it follows layers, and no pickle takes it to other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import fused_workloads as work
from tests.distributed.harness import run
from tests.distributed.workloads import Case

MOVES = [[0, 2, 8], [0, 7, 8], [0, 4, 8]]


def whole(results: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for result in results:
        found.update({key: value for key, value in result["state"].items() if key != "shards"})
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
def test_a_fused_optimizer_trains_on_bitwise(precision: str) -> None:
    # Not fp32 with ZeRO-1: torch's fused kernel on a CPU rounds the last elements of a buffer otherwise than the rest.
    case = Case(precision=precision, groups="sparse", clip=0.0 if "zero1" in precision else 1.0)
    still, moved = (run(2, work.train_fused, case, moves) for moves in ([None] * len(MOVES), MOVES))
    assert [result["losses"] for result in moved] == [result["losses"] for result in still]
    assert whole(moved) == whole(still)


def test_what_is_on_an_accelerator_is_not_pickled_there() -> None:
    for result in run(2, work.send_accelerated):
        assert result["steps"] == [(torch.Tensor, 1.0)] * 2
        assert result["gathered"] == [0.0, 1.0] and result["broadcast"] == 0.0
        assert "1: " in result["message"] and "device meta: it has no data" in result["message"]
