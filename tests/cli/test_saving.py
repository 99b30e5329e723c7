"""A run of the training command saves alone into its folder, and says before it trains if that has too little room."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch

from ds_dynmo import CheckpointError, ConfigError
from ds_dynmo.cli import command_line
from ds_dynmo.cli.train import build_cases, build_engine, train
from ds_dynmo.cli.train import save as save_checkpoint
from ds_dynmo.cli.training.options import TrainingRun, prepare
from ds_dynmo.cli.training.saving import after_failed_save, check_room, claimed
from ds_dynmo.engine.save.manifest import stage_file
from ds_dynmo.files.claims import CLAIM
from tests.support.checkpoints import damaged
from tests.support.claimant import Claimant
from tests.support.harness import run
from tests.support.saved_runs import save_metadata
from tests.support.script import flags, run_command

# -- room ---------------------------------------------------------------------------------------------


def sizes(arguments: list[str], folder: Path) -> tuple[int, int, int]:
    """Return the expected bytes of a checkpoint before training, those of the one that is saved, and its files."""
    training = prepare(arguments)
    engine = build_engine(training)
    expected = engine.checkpoint_bytes()
    train(training, engine, build_cases(training, engine))
    found = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return expected, sum(found), len(found)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "changes",
    [
        ("model.tied_embedding=true",),
        pytest.param(('model.case={"kind": "moe", "experts": 4, "expert_parallel": true}',), marks=pytest.mark.nightly),
        pytest.param(('optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}',), marks=pytest.mark.nightly),
        ('bf16={"enabled": true}', 'zero_optimization={"stage": 1}'),
    ],
)
def test_the_expected_size_of_a_checkpoint_is_that_of_the_first(tmp_path: Path, changes: tuple[str, ...]) -> None:
    """Beside it a file has names, shapes and random states, a few KiB."""
    folder = tmp_path / "saved"
    arguments = [*flags(tmp_path, "dense", 1), "--save", str(folder), "--stages", "2"]
    for change in ("model.hidden_size=96", *changes):
        arguments += ["--set", change]
    for expected, found, files in run(4, sizes, arguments, folder):
        assert expected > 2**19 and expected <= found <= 1.01 * expected + files * 6000, (expected, found, files)


class Room(NamedTuple):
    free: int
    interval: int | None
    keep: int | None
    says: str
    fits: bool


ROOMS = [
    Room(1000, None, None, "", True),
    Room(999, None, None, "999 bytes are free there, and 1 checkpoint of this run will take about 1000 bytes", False),
    Room(1999, 3, None, "1.95 KiB are free there, and 2 checkpoints of this run will take about 1.95 KiB", False),
    Room(3999, 2, None, "3.91 KiB are free there, enough for 3 of the 4 checkpoints of about 1000 bytes that", True),
    Room(4000, 2, None, "", True),
    Room(2999, 1, 2, "2.93 KiB are free there, enough for 2 of the 3 checkpoints of about 1000 bytes that", True),
    Room(3000, 1, 2, "", True),
]


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_free_space_is_compared_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, room: Room
) -> None:
    """Of a run of 8 steps. With --keep N there are N checkpoints, and the next until it is whole."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    save, section = tmp_path / "new" / "saved", Mock()
    given = [*flags(tmp_path, "dense", 8), "--save", str(save)]
    training = prepare([*given, *([] if room.interval is None else ["--save-interval", str(room.interval)])])
    section.checkpoint.keep = room.keep
    engine = Mock(dynmo=section, global_rank=0)
    engine.checkpoint_bytes.return_value = 1000
    with patch.object(shutil, "disk_usage", return_value=Mock(free=room.free)) as asked:
        if room.fits:
            check_room(training, engine)
            said = capsys.readouterr().out
            assert said.startswith(f"--save {save}: {room.says}" if room.says else "") and bool(said) == bool(room.says)
        else:
            with pytest.raises(ConfigError, match=f"^--save {save}: {room.says}: make room or name another folder$"):
                check_room(training, engine)
    assert asked.call_args.args == (tmp_path,)


# -- one run ------------------------------------------------------------------------------------------


def test_a_folder_in_which_a_run_saves_now_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    save = tmp_path / "saved"
    given = [*flags(tmp_path, "dense", 8), "--save", str(save), "--resume", str(save)]
    with Claimant(save) as other:
        other.tell("claim")
        line = f"^--save {save}: process {other.number} on .* saves there now: name another folder; with --take-over "
        with pytest.raises(ConfigError, match=line), claimed(prepare(given)):
            raise AssertionError
        assert other.tell("check") == ""
        with claimed(prepare([*given, "--take-over"])):
            assert f"process {os.getpid()} on" in other.tell("check")


def test_without_the_section_a_run_whose_folder_was_taken_over_saves_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    training, engine = prepare([*flags(tmp_path, "dense", 8), "--save", str(tmp_path / "saved")]), Mock(dynmo=None)
    engine.global_rank = 0
    with Claimant(tmp_path / "saved") as other:
        other.tell("claim")
        with pytest.raises(CheckpointError, match="has claimed it, so this process saves nothing there"):
            save_checkpoint(training, engine, [], "global_step4")
    engine.save_checkpoint.assert_not_called()


def test_a_folder_that_has_checkpoints_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    given, save = flags(tmp_path, "dense", 8), tmp_path / "saved"
    begun = {**prepare(given).state_dict(), "step": 4, "stages": 1, "partition": [0, 6], "cases": {}}
    for folder in ("saved", "elsewhere"):
        save_metadata(tmp_path / folder / "global_step4", begun)
    line = (
        rf"^--save {save}: has checkpoints of another run \(global_step4\): name another folder; --resume {save} goes"
    )
    resuming: Any = ("--resume", str(tmp_path / "elsewhere"))
    for flag in ((), resuming):
        with pytest.raises(ConfigError, match=line):
            prepare([*given, "--save", str(save), *flag])
        assert prepare([*given, "--save", str(save), *flag, "--take-over"]).take_over
    assert (
        prepare([*given, "--save", str(save), "--resume", str(tmp_path / "elsewhere" / ".." / "saved")]).first_step == 4
    )
    with pytest.raises(ConfigError, match=r"was trained with model.hidden_size = 16, this run has 32"):
        prepare([*given, "--save", str(save), "--resume", str(save), "--set", "model.hidden_size=32"])


def test_a_checkpoint_of_a_script_of_ones_own_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is refused in turn is advised."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    given, saved = flags(tmp_path, "dense", 8), tmp_path / "saved"
    for tag in ("global_step3", "global_step4"):
        save_metadata(saved / tag, {})
        torch.save({"global_steps": 4}, saved / tag / stage_file(0))
    own = (
        r"lacks ds_dynmo_train: a script of your own saved this checkpoint, and its engine\.load_checkpoint goes on "
        r"from there; of a Hugging Face model, .*huggingface\.export writes a folder that --set .* begins with$"
    )
    for flag in ((), ("--newest-whole",), ("--tag", "global_step3")):
        with pytest.raises(ConfigError, match=rf"^--resume {saved}/global_step[34]/.*: {own}"):
            prepare([*given, "--resume", str(saved), *flag])
    refused = r"has checkpoints of another run \(global_step4, .*\): name another folder; --take-over saves there too"
    with pytest.raises(ConfigError, match=f"^--save {saved}: {refused}"):
        prepare([*given, "--save", str(saved)])
    assert prepare([*given, "--save", str(saved), "--take-over"]).first_step == 0


# -- the whole command --------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_run_keeps_its_newest_checkpoints_and_goes_on_from_the_newest_whole_one(tmp_path: Path) -> None:
    given, save = flags(tmp_path, "dense", 4), tmp_path / "saved"
    saving = ["--save", str(save), "--save-interval", "1", "--keep", "2"]
    assert [code for code, *_ in run(2, run_command, [*given, *saving, "--stop-at", "3"])] == [0, 0]
    assert sorted(os.listdir(save)) == [CLAIM, "global_step2", "global_step3", "latest"]
    damaged(save / "global_step3" / "layer_01-model_states.pt", "flipped")
    resuming = [*given, "--resume", str(save)]
    advice = (
        "its checksum differs); other checkpoints there that are whole: global_step2; --newest-whole goes on from the "
        "newest that is whole, --tag TAG from another\n"
    )
    for code, _, said in run(2, refused_command, resuming):
        assert code == 2 and f"{save}/global_step3/layer_01-model_states.pt: " in said and said.endswith(advice)
    (code, printed, _), _ = run(2, run_command, [*resuming, "--newest-whole"])
    lines = [line.split(";")[0] for line in printed.splitlines() if line.startswith("resuming")]
    assert lines == [f"resuming from {save}/global_step{step}: step {step} of 4" for step in (3, 2)]
    assert code == 0 and "step 3/4: " in printed
    damaged(save / "global_step3" / "mp_rank_00_model_states.pt", "missing")
    with pytest.raises(ConfigError, match=r"no such file; other .* whole: global_step2; --newest-whole goes on"):
        prepared(resuming)
    resumed = prepared([*resuming, "--newest-whole"]).resumed
    assert resumed is not None and resumed["tag"] == "global_step2"
    others = (
        "the last whole checkpoint there is global_step3, others are global_step2: make room or name another folder"
    )
    both = [*resuming, "--newest-whole", "--save", str(save)]
    assert after_failed_save(prepared(both)).startswith(others)
    with (
        patch.object(os, "statvfs", return_value=Mock(f_flag=os.ST_RDONLY)),
        pytest.raises(
            ConfigError, match=rf"^--save {save}: cannot be written: Read-only file system; whole .* there: "
        ),
    ):
        prepared(both)


def refused_command(arguments: list[str]) -> tuple[int, str, str]:
    with patch.object(command_line, "FIRST_RANK_SECONDS", 0.0):
        return run_command(arguments)


def prepared(arguments: list[str]) -> TrainingRun:
    with patch.dict(os.environ, WORLD_SIZE="2"):
        return prepare(arguments)
