"""List the checkpoints in a folder: all, those that are whole, and those of a run, of which older ones are removed."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import islice

from ds_dynmo.engine.save import folder as folders
from ds_dynmo.engine.save.manifest import MANIFEST, Manifest
from ds_dynmo.engine.save.manifest_files import read_all
from ds_dynmo.engine.save.safe_load import check_file
from ds_dynmo.errors import CheckpointError

NAMED = 3  # in a message; to look for all may take long
NUMBERED = re.compile(r"global_step\d+")  # tags of checkpoints that no one gave a name


def checkpoints(save_dir: str) -> list[str]:
    """List the tags of ds_dynmo's checkpoints in a folder, the one that was written last first."""
    written = {}
    for name in os.listdir(save_dir) if os.path.isdir(save_dir) else ():
        tag = folders.tag_of(name)
        path = None if tag is None else folders.find(save_dir, tag)
        if tag is not None and path is not None:
            with suppress(OSError):  # it is none of ours, or vanished
                written[tag] = os.stat(os.path.join(path, MANIFEST)).st_mtime_ns
    return sorted(written, key=lambda tag: written[tag], reverse=True)


def whole_checkpoints(save_dir: str, *, besides: str | None = None) -> list[str]:
    """List the newest :data:`NAMED` tags of checkpoints whose files are all there, but for the tag ``besides``.

    Sizes, and the checksums that files have of their content, are compared with what was written. No tensor is read.
    """
    others = (tag for tag in checkpoints(save_dir) if tag != besides)
    return list(islice((tag for tag in others if _is_whole(folders.find(save_dir, tag))), NAMED))


def remove_older(save_dir: str, run: str, keep: int) -> None:
    """Remove numbered checkpoints of a run but for the ``keep`` that were written last, and what ``latest`` names.

    Raises:
        OSError: one cannot be removed.
    """
    latest = folders.read_latest(save_dir)
    of_run = [tag for tag in checkpoints(save_dir) if NUMBERED.fullmatch(tag) and is_of_run(save_dir, tag, run)]
    for tag in of_run[keep:]:
        if tag != latest:
            folders.remove(save_dir, tag)


def is_of_run(save_dir: str, tag: str, run: str) -> bool:
    """Return whether a checkpoint is there and was saved by a run. A checkpoint is there once all of it is."""
    with suppress(OSError, ValueError), open(os.path.join(save_dir, tag, MANIFEST), encoding="utf-8") as file:
        return bool(Manifest.from_json(file.read()).state.get("run") == run)
    return False


def _is_whole(folder: str | None) -> bool:
    if folder is None:
        return False
    try:
        with open(os.path.join(folder, MANIFEST), encoding="utf-8") as file:
            manifest = read_all(folder, file.read())
        for name, saved in manifest.files.items():
            check_file(os.path.join(folder, name), saved)
    except (CheckpointError, OSError):
        return False
    return True
