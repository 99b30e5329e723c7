"""One process at a time saves into a folder that was claimed, on file systems with and without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo import CheckpointError, ConfigError
from ds_dynmo.engine.save.folder import CheckpointFolder
from ds_dynmo.files.claims import CLAIM, check_claim, claim_folder
from tests.support.claimant import Claimant


def test_a_second_process_is_refused_until_the_first_has_ended_in_whatever_way(tmp_path: Path) -> None:
    with Claimant(tmp_path) as first, Claimant(tmp_path) as second:
        assert first.tell("claim") == ""
        saves = f"process {first.number} on {socket.gethostname()}"
        assert second.tell("claim") == f"{tmp_path}: {saves} saves there now"
        with pytest.raises(CheckpointError, match=f"^{tmp_path}: {saves} has claimed it, so this process saves noth"):
            CheckpointFolder(str(tmp_path), "one").begin()
        assert os.listdir(tmp_path) == [CLAIM]
        first.kill()
        CheckpointFolder(str(tmp_path), "one").begin()
        assert second.tell("claim") == "" and second.tell("check") == ""
        second.kill()
        with claim_folder(tmp_path):
            check_claim(str(tmp_path))


def unseen(*_: Any) -> None:
    """Lock as a file system does that shows no locks of other machines."""


def without_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("lock", [fcntl.flock, unseen, without_locks])
def test_the_process_whose_folder_was_taken_over_saves_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: Any
) -> None:
    """Also when the other has ended, and where neither sees the lock of the other."""
    (tmp_path / "a checkpoint").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fcntl.flock if lock is unseen else lock)
        with Claimant(tmp_path) as first:
            assert first.tell("claim") == first.tell("check") == ""
            patch.setattr(fcntl, "flock", lock)
            with claim_folder(tmp_path, take_over=lock is fcntl.flock):
                check_claim(str(tmp_path))
                assert f"process {os.getpid()} on" in first.tell("check")
            assert f"process {os.getpid()} on" in first.tell("check")
    assert sorted(os.listdir(tmp_path)) == [CLAIM, "a checkpoint"]


def test_a_claim_removes_the_folders_that_it_made_if_nothing_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    for _ in range(2):
        with pytest.raises(KeyError), claim_folder(folder):
            assert os.listdir(folder) == [CLAIM]
            raise KeyError
        assert os.listdir(tmp_path) == []
    with claim_folder(folder):
        (folder / "one").mkdir()
    assert sorted(os.listdir(folder)) == [CLAIM, "one"]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), claim_folder(tmp_path / "file"):
        pass


def test_a_claim_is_a_context_that_refuses_at_its_beginning(tmp_path: Path) -> None:
    with Claimant(tmp_path) as other:
        other.tell("claim")
        with pytest.raises(ConfigError, match="saves there now"), claim_folder(tmp_path):
            raise AssertionError
        assert os.listdir(tmp_path) == [CLAIM] and other.tell("check") == other.tell("end") == ""
    assert os.listdir(tmp_path) == []
