"""What killed jobs left in a folder of checkpoints is removed; what another job is writing stays."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.engine.save import folder as folders
from ds_dynmo.engine.save.folder import CheckpointFolder
from tests.support.kills import killed_at

STEPS_OF_WRITING = [
    (os, "rename"), (os, "replace"), (os, "makedirs"), (os, "rmdir"), (os, "unlink"), (os, "fsync"), (os, "close"),
    (shutil, "rmtree"),
]  # fmt: skip
FILES = ("content", "dynmo/manifest.json")


def begun(save_dir: Path, tag: str, age_seconds: float) -> Path:
    """Make the folder of a checkpoint that was last written to ``age_seconds`` ago."""
    folder = CheckpointFolder(str(save_dir), tag)
    folder.begin()
    path = Path(folder.temporary)
    (path / "some.pt").write_text("half of it")
    for found in (path, *path.iterdir()):
        then = found.stat().st_mtime - age_seconds
        os.utime(found, (then, then))
    return path


def written(folder: CheckpointFolder, content: str) -> CheckpointFolder:
    """Write a checkpoint that has no name yet."""
    folder.begin()
    for name in FILES:
        Path(folder.temporary, name).write_text(content)
    return folder


def save(save_dir: Path, tag: str, content: str) -> None:
    written(CheckpointFolder(str(save_dir), tag), content).commit(save_latest=True)


def content_of(save_dir: Path, tag: str) -> str | None:
    """Return what every file of a checkpoint has; None: there is no such checkpoint."""
    path = folders.find(str(save_dir), tag)
    if path is None:
        return None
    (content,) = {Path(path, name).read_text() for name in FILES}
    return content


# -- jobs that were killed ----------------------------------------------------------------------------


def in_a_process(function: Callable[[], Any]) -> int:
    """Call a function in a process of its own; return its exit code."""
    child = os.fork()
    if not child:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_killed_at(step: int, function: Callable[[], None]) -> bool:
    """Kill a process that calls ``function`` before its ``step``-th step; return whether it had so many."""

    def call() -> None:
        with killed_at(step, STEPS_OF_WRITING, lambda: os._exit(1)):
            function()

    return in_a_process(call) == 1


@pytest.mark.parametrize("tags", [["one", "one"], ["one", "two"], ["one", "two", "one"]], ids="-".join)
def test_nothing_is_left_of_a_save_that_was_killed_at_any_step(tmp_path: Path, tags: list[str]) -> None:
    """It replaces a checkpoint, the latest or an older one, or writes one beside it; then one is saved, or loaded."""
    *saved, tag = tags
    step, was_killed = 0, True
    while was_killed:
        save_dir, other = tmp_path / str(step), tmp_path / f"{step} again"
        for name in saved:
            save(save_dir, name, "old")
        was_killed = is_killed_at(step, lambda save_dir=save_dir: save(save_dir, tag, "new"))
        shutil.copytree(save_dir, other)
        latest = folders.read_latest(str(save_dir))
        assert latest is not None and content_of(save_dir, latest) in ("old", "new"), step
        found = {name: content_of(save_dir, name) for name in tags}
        for name, content in found.items():
            allowed = [*(["old"] if name in saved else [None]), *(["new"] if name == tag else [])]
            assert content in allowed, (step, name)
        save(save_dir, "three", "newest")
        folders.tidy(str(other))
        for folder, more in ((save_dir, {"three"}), (other, set[str]())):
            assert {name: content_of(folder, name) for name in found} == found, (step, folder)
            there = {"latest", *more, *(name for name, content in found.items() if content)}
            assert {*os.listdir(folder)} - {".latest.writing"} == there, step  # a line, which the next save replaces
            assert all({*os.listdir(folder / name)} == {"content", "dynmo"} for name in there - {"latest"}), step
        step += 1
    assert step > 15


def test_a_job_that_is_killed_again_while_it_removes_leaves_nothing(tmp_path: Path) -> None:
    step, was_killed = 0, True
    while was_killed:
        save_dir = tmp_path / str(step)
        for tag in ("one", "one", "two"):
            in_a_process(lambda save_dir=save_dir, tag=tag: begun(save_dir, tag, 0))
        was_killed = is_killed_at(step, lambda save_dir=save_dir: folders.tidy(str(save_dir)))
        folders.tidy(str(save_dir))
        assert os.listdir(save_dir) == [], step
        step += 1
    assert step > 5


# -- jobs that run ------------------------------------------------------------------------------------


def test_an_abandoned_folder_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    """One fresh file says that it is in use."""
    abandoned, in_use, written_to = (
        begun(tmp_path, f"global_step{step}", age)
        for step, age in ((1, folders.ABANDONED_SECONDS + 60), (2, 0), (4, folders.ABANDONED_SECONDS + 60))
    )
    foreign = tmp_path / ".notes.writing"
    foreign.mkdir()
    os.utime(foreign, (0, 0))
    (written_to / "some.pt").write_text("more of it")
    begun(tmp_path, "global_step3", 0)
    assert in_use.is_dir() and foreign.is_dir() and written_to.is_dir() and not abandoned.exists()


def without_locks(*_: Any) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_a_save_whose_lock_is_not_seen_is_in_use_for_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on a file system without locks, or of another machine."""
    for module, name, unseen in ((fcntl, "flock", without_locks), (socket, "gethostname", lambda: "another")):
        for age_seconds in (0, folders.ABANDONED_SECONDS + 60):
            folder = tmp_path / f"{name} {age_seconds}"
            with monkeypatch.context() as patch:
                patch.setattr(module, name, unseen)
                in_a_process(lambda folder=folder, age=age_seconds: begun(folder, "one", age))
            folders.tidy(str(folder))
            assert os.listdir(folder) == ([".one.writing"] if age_seconds == 0 else []), folder


def test_a_file_system_without_locks_takes_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    for content in ("old", "new"):
        save(tmp_path, "one", content)
        assert content_of(tmp_path, "one") == content
    folder = written(CheckpointFolder(str(tmp_path), "two"), "new")
    folder.discard()
    assert sorted(os.listdir(tmp_path)) == ["latest", "one"]


def test_a_save_goes_on_whatever_another_job_does_between_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job saves another tag and loads this one, in the middle of each rename too."""
    save(tmp_path, "one", "old")
    seen = []

    def beside(original: Callable[..., None]) -> Callable[..., None]:
        def rename(*args: Any) -> None:
            for when in ("before", "after"):
                with monkeypatch.context() as patch:
                    patch.setattr(os, "rename", original)
                    save(tmp_path, "two", "beside")
                    folders.tidy(str(tmp_path))
                seen.append(content_of(tmp_path, "one"))
                if when == "before":
                    original(*args)

        return rename

    folder = written(CheckpointFolder(str(tmp_path), "one"), "new")
    monkeypatch.setattr(os, "rename", beside(os.rename))
    folder.commit(save_latest=True)
    assert seen == ["old", "new", "new", "new"]
    assert sorted(os.listdir(tmp_path)) == ["latest", "one", "two"] and content_of(tmp_path, "one") == "new"


def test_a_tag_is_replaced_again_and_again_and_no_other_is_touched(tmp_path: Path) -> None:
    for tag in ("last.replaced", ".last.old"):
        (tmp_path / tag).mkdir()
    for content in ("old", "new", "newer"):
        save(tmp_path, "last", content)
        assert content_of(tmp_path, "last") == content
        (tmp_path / ".last.dynmo-removed").mkdir()  # of a job that was killed while it removed the old one
    save(tmp_path, "last", "newest")
    assert sorted(os.listdir(tmp_path)) == [".last.old", "last", "last.replaced", "latest"]


def test_a_folder_that_may_only_be_read_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_process(lambda: written(CheckpointFolder(str(tmp_path), "one"), "new"))
    (tmp_path / ".one.dynmo-removed").mkdir()

    def refuse(*_: Any) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(os, "rename", refuse)
    folders.tidy(str(tmp_path))
    assert content_of(tmp_path, "one") == "new"
    folders.tidy(str(tmp_path / "nowhere"))
