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


@pytest.mark.parametrize("precision", work.PRECISIONS)
def test_a_run_continues_bitwise(tmp_path: Path, precision: str) -> None:
    shutil.unpack_archive(CHECKPOINTS / f"{precision}.tar.xz", tmp_path)
    then = json.loads((CHECKPOINTS / f"{precision}.json").read_text())
    now = run(len(then), work.resume, precision, str(tmp_path))
    for ours, theirs in zip(now, then, strict=True):
        assert ours["client"] == 4
        assert ours["saved"] == theirs["saved"]
        assert ours["afterwards"] == theirs["afterwards"]
    # The state of the controller and the cost model, and the placement, are saved again as they were.
    before, after = manifest(tmp_path, precision), manifest(tmp_path, "again")
    assert after["files"].keys() == before["files"].keys()
    history, known = (found["state"]["experience"]["history"] for found in (after, before))
    for key in history.keys() - known.keys():  # of later versions
        del history[key]
    for key in before.keys() - {"files"}:
        assert after[key] == before[key], key
