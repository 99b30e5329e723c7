"""Checkpoints of an earlier version load bitwise: weights, optimizer state, counters, and the state of decisions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import run
from tests.fixtures import write_checkpoints as work

CHECKPOINTS = Path(work.__file__).parent / "checkpoints"


def manifest(folder: Path, tag: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / tag / "dynmo" / "manifest.json").read_text())
    return read


def then_and_now(precision: str, folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return, per rank, what the run that saved the checkpoint computed, and what today's computes from it."""
    shutil.unpack_archive(CHECKPOINTS / f"{precision}.tar.xz", folder)
    then = json.loads((CHECKPOINTS / f"{precision}.json").read_text())
    return list(zip(then, run(len(then), work.resume, precision, str(folder)), strict=True))


@pytest.mark.parametrize("precision", work.LOADED_WITH)
def test_fp16_without_zero_continues_under_zero(tmp_path: Path, precision: str) -> None:
    """fp32 weights, moments, counts of steps and the loss scale are equal; losses until a layer thaws.

    Its steps were counted by themselves, and are counted with its group's now.
    """
    for theirs, ours in then_and_now(precision, tmp_path):
        assert ours["client"] == 4
        assert ours["saved"] == theirs["saved"]
        assert ours["afterwards"]["losses"][:3] == theirs["afterwards"]["losses"][:3]
    before, after = manifest(tmp_path, precision), manifest(tmp_path, "again")
    assert (before["optimizer"], after["optimizer"]) == ("fp16", "flat")


@pytest.mark.parametrize("precision", work.LOADED_WITH)
@pytest.mark.parametrize("stages", [1, 3])
def test_fp16_without_zero_loads_into_other_stages(tmp_path: Path, precision: str, stages: int) -> None:
    shutil.unpack_archive(CHECKPOINTS / f"{precision}.tar.xz", tmp_path)
    then = json.loads((CHECKPOINTS / f"{precision}.json").read_text())
    now = run(stages, work.load, precision, str(tmp_path), stages)
    before, after = (
        {key: value for held in of_ranks for key, value in held.items()}
        for of_ranks in ([of_rank["saved"]["state"] for of_rank in then], now)
    )
    assert after == before


@pytest.mark.parametrize("precision", ["fp32", "fp32_zero1", "bf16_zero1"])
def test_a_run_continues_bitwise(tmp_path: Path, precision: str) -> None:
    states: list[dict[str, Any]] = [{}, {}]
    for theirs, ours in then_and_now(precision, tmp_path):
        assert ours["client"] == 4
        assert ours["saved"] == theirs["saved"]
        for of_run, run_of_rank in zip(states, (theirs, ours), strict=True):
            of_run.update(run_of_rank["afterwards"].pop("state"))  # a decision on the way depends on seconds
        assert ours["afterwards"] == theirs["afterwards"]
    assert states[0] == states[1]
    # The state of the controller and the cost model, and the placement, are saved again as they were.
    before, after = manifest(tmp_path, precision), manifest(tmp_path, "again")
    assert after["files"].keys() == before["files"].keys()
    history, known = (found["state"]["experience"]["history"] for found in (after, before))
    for key in history.keys() - known.keys():  # of later versions
        del history[key]
    for key in before.keys() - {"files"}:
        assert after[key] == before[key], key
