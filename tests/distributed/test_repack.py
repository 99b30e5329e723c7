"""Fewer ranks and more in mid-run, bitwise as a restart from a checkpoint at the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import repack_workloads
from tests.distributed.harness import run
from tests.distributed.workloads import Case

PARK = {"interval": 0, "repack": {"release": "park"}}


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole model's state; shards put together."""
    whole: dict[str, Any] = {}
    shards: dict[str, list[tuple[int, bytes]]] = {}
    for result in results:
        own = dict(result["state"])
        for key, part in own.pop("shards", {}).items():
            shards.setdefault(key, []).append(part)
        whole.update(own)
    whole.update({key: b"".join(data for _, data in sorted(set(parts))) for key, parts in shards.items()})
    return whole


def losses(results: list[dict[str, Any]]) -> dict[int, float]:
    """By step; every rank that trained a step has to say the same."""
    found: dict[int, float] = {}
    for result in results:
        for step, loss in result["losses"].items():
            assert found.setdefault(step, loss) == loss
    return found


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_fewer_and_fewer_ranks_train_as_if_restarted_from_checkpoints(
    tmp_path: Path, precision: str, replicas: int
) -> None:
    sizes, steps = {2: 3, 4: 2, 6: 1}, 8
    case = Case(stages=4, replicas=replicas, precision=precision, tied=precision == "fp32", groups="two")
    repacked = run(case.ranks, repack_workloads.train, case, sizes, steps)
    first, expected = 0, {}
    for last, stages in [(2, 4), (4, 3), (6, 2), (8, 1)]:
        smaller = Case(**{**vars(case), "stages": stages})
        end = run(smaller.ranks, repack_workloads.train_through_checkpoint, smaller, str(tmp_path), first, last)
        expected.update(losses(end))
        first = last
    assert losses(repacked) == expected
    assert merged(repacked) == merged(end)


def test_parked_ranks_come_back() -> None:
    case = Case(stages=4, dynmo=PARK, groups="two", scheduler=True)
    came_back = run(4, repack_workloads.train, case, {2: 1, 4: 2, 6: 4}, 8)
    stayed = run(4, repack_workloads.train_alone, case, 8)
    assert losses(came_back) == losses(stayed)
    assert merged(came_back) == merged(stayed)
