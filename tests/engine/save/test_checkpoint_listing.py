"""Older checkpoints of a run are removed, those of others are not; and the newest whole one is found."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed.utils import logger

from ds_dynmo import CheckpointError
from ds_dynmo.engine.save import folder as folders
from ds_dynmo.engine.save.listing import checkpoints, whole_checkpoints
from tests.support.checkpoints import check_same, damaged, outcome, train_on
from tests.support.configs import Case
from tests.support.harness import run
from tests.support.training import Warnings, build, gather

pytestmark = pytest.mark.ranks


def section(kind: str, **keys: Any) -> dict[str, Any]:
    return {"interval": 0, "checkpoint": {"kind": kind, **keys}}


def save_steps(engine: Any, folder: str, steps: int) -> list[list[str]]:
    """Train and save after every batch; return what is in the folder each time when the checkpoint is whole."""
    found = []
    for _ in range(steps):
        train_on(engine, engine.global_steps, 1)
        engine.save_checkpoint(folder)
        engine.wait_for_save()
        gather(None)
        found.append(sorted(os.listdir(folder)))
        gather(None)
    return found


# -- removing older ones ------------------------------------------------------------------------------


def keep_two(kind: str, folder: str) -> list[list[str]]:
    other = build(Case(micro_batches=1))
    assert "no checkpoint of this run" in other.stage.comm.how_to_continue()
    save_steps(other, folder, 1)
    assert f"engine.load_checkpoint({folder!r}, 'global_step1')" in other.stage.comm.how_to_continue()
    other.save_checkpoint(folder, tag="global_step9", save_latest=False)
    case = Case(micro_batches=1, dynmo=section(kind, keep=2))
    engine = build(case)
    train_on(engine, 0, 1)
    engine.save_checkpoint(folder, tag="best", save_latest=False)
    found = save_steps(engine, folder, 3)
    resumed = build(case)
    resumed.load_checkpoint(folder)
    resumed.checkpointer._paths.append(f"{folder}/global_step9")  # begun, to take the place of another run's
    assert f"{folder}/global_step4: start again" in resumed.stage.comm.how_to_continue()
    return [*found, *save_steps(resumed, folder, 1)]


@pytest.mark.parametrize("kind", ["blocking", pytest.param("background", marks=pytest.mark.nightly)])
def test_the_newest_checkpoints_of_a_run_stay_and_all_of_others(tmp_path: Path, kind: str) -> None:
    """A resumed run is the same run. A name that the user gave stays."""
    others = {"best", "global_step1", "global_step9", "latest"}
    for found in run(2, keep_two, kind, str(tmp_path)):
        numbered = [sorted({*names} - others) for names in found]
        assert numbered == [
            ["global_step2"],
            ["global_step2", "global_step3"],
            ["global_step3", "global_step4"],
            ["global_step4", "global_step5"],
        ]
        assert all(others <= {*names} for names in found)


def keep_what_cannot_be_removed(folder: str) -> tuple[list[str], list[list[str]]]:
    """Let ``latest`` name the first checkpoint, and let the removal of the second fail."""
    engine, warnings = build(Case(micro_batches=1, dynmo=section("background", keep=1))), Warnings()
    found = save_steps(engine, folder, 1)
    for _ in range(2):
        train_on(engine, engine.global_steps, 1)
        with patch.object(shutil, "rmtree", side_effect=PermissionError(13, "Permission denied", "a file")):
            engine.save_checkpoint(folder, save_latest=False)
            engine.wait_for_save()
    gather(None)
    found.append([name for name in sorted(os.listdir(folder)) if not name.startswith(".")])
    gather(None)
    return warnings.messages, [*found, *save_steps(engine, folder, 1)]


def test_what_latest_names_stays_and_a_failed_removal_is_a_warning(tmp_path: Path) -> None:
    (warnings, found), (of_second, _) = run(2, keep_what_cannot_be_removed, str(tmp_path))
    assert [line for line in warnings if "stays: [Errno 13] Permission denied: 'a file'" in line] == warnings != []
    assert of_second == [] and found[0] == ["global_step1", "latest"]
    assert found[1:] == [["global_step1", "global_step3", "latest"], ["global_step4", "latest"]]


# -- the newest whole one -----------------------------------------------------------------------------


def save_four(folder: str) -> dict[str, Any]:
    """Return what follows the first."""
    engine = build(Case(micro_batches=1))
    save_steps(engine, folder, 1)
    found = outcome(engine, train_on(engine, 1, 1))
    train_on(engine, 2, 1)
    save_steps(engine, folder, 3)
    return found


def load_newest_whole(folder: str) -> tuple[str, str, dict[str, Any], list[str], str]:
    engine, warnings = build(Case(micro_batches=1, start=(0, 2, 8))), Warnings(logger)
    message = ""
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        message = str(error)
    path, _ = engine.load_checkpoint(folder, newest_whole=True)
    found = outcome(engine, train_on(engine, engine.global_steps, 1))
    (Path(folder) / "global_step1" / "dynmo" / "manifest.json").unlink(missing_ok=True)
    gather(None)
    with pytest.raises(CheckpointError) as refused:
        engine.load_checkpoint(folder, newest_whole=True)
    return message, os.path.basename(os.path.dirname(path)), found, warnings.messages, str(refused.value)


def test_the_newest_whole_checkpoint_is_found_if_asked_for(tmp_path: Path) -> None:
    """Of the newest a bit has flipped; the next lost its end; from the third a file is missing."""
    saved = run(2, save_four, str(tmp_path))
    assert checkpoints(str(tmp_path)) == [f"global_step{step}" for step in (6, 5, 4, 1)]
    damaged(tmp_path / "global_step6" / "mp_rank_01_model_states.pt", "flipped")
    damaged(tmp_path / "global_step5" / "layer_05-model_states.pt", "truncated")
    damaged(tmp_path / "global_step4" / "dynmo" / "manifest-pipe_01.json", "missing")
    assert whole_checkpoints(str(tmp_path)) == ["global_step6", "global_step1"]  # its tensors are not read
    assert whole_checkpoints(str(tmp_path), besides="global_step6") == ["global_step1"]
    results = run(2, load_newest_whole, str(tmp_path))
    for message, tag, _, _, none in results:
        file = f"{tmp_path}/global_step6/mp_rank_01_model_states.pt: "
        assert f"{file}optimizer/" in message and "its checksum differs" in message
        assert message.endswith("; other checkpoints there that are whole: global_step1")
        assert tag == "global_step1" and file in none
    check_same(saved, [found for _, _, found, *_ in results])
    (warning,) = [line for line in results[0][3] if "is loaded" in line]
    assert f"{tmp_path}: global_step1 is loaded, the newest that can be: " in warning and "mp_rank_01" in warning


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert checkpoints(str(tmp_path / "nowhere")) == whole_checkpoints(str(tmp_path)) == []
    (tmp_path / "notes").mkdir()
    folders.write_latest(str(tmp_path), "notes")
    assert checkpoints(str(tmp_path)) == []
