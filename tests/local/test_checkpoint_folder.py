"""What killed jobs left in a folder of checkpoints is removed; what another job is writing stays."""

from __future__ import annotations

import os
from pathlib import Path

from ds_dynmo.engine.save import folder as folders
from ds_dynmo.engine.save.folder import CheckpointFolder


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


def test_an_abandoned_folder_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    in_use = begun(tmp_path, "global_step2", 0)
    abandoned = begun(tmp_path, "global_step1", folders.ABANDONED_SECONDS + 60)
    foreign = tmp_path / ".notes.writing"
    foreign.mkdir()
    os.utime(foreign, (0, 0))
    begun(tmp_path, "global_step3", 0)
    assert in_use.is_dir() and foreign.is_dir() and not abandoned.exists()


def test_a_folder_with_one_fresh_file_is_in_use(tmp_path: Path) -> None:
    path = begun(tmp_path, "global_step1", folders.ABANDONED_SECONDS + 60)
    (path / "some.pt").write_text("more of it")
    begun(tmp_path, "global_step2", 0)
    assert path.is_dir()


def test_a_checkpoint_that_replaced_another_can_be_replaced(tmp_path: Path) -> None:
    """A job was killed after the new checkpoint was in place and before the old one was removed."""
    for content in ("old", "new", "newer"):
        folder = CheckpointFolder(str(tmp_path), "last")
        folder.begin()
        Path(folder.temporary, "content").write_text(content)
        folder.commit(save_latest=True)
        if content == "new":
            (tmp_path / "last.replaced").mkdir()
    assert (tmp_path / "last" / "content").read_text() == "newer"
    assert sorted(os.listdir(tmp_path)) == ["last", "latest"]
