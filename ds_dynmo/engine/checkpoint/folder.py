"""A checkpoint appears as a whole or not at all: a temporary folder, renames, and ``latest`` by rename too."""

from __future__ import annotations

import os
import shutil

from ds_dynmo.engine.checkpoint.layout import FOLDER

LATEST = "latest"


class CheckpointFolder:
    """The folder ``save_dir/tag``, and those beside it while it is written. For one rank alone.

    A new tag appears with one rename. No folder can be renamed over another, so a tag that exists is replaced in
    steps: the new one is called ``tag.replacing``, ``latest`` names that where it named ``tag``, the old one becomes
    ``tag.replaced``, hard links to the new one become ``tag``, ``latest`` names ``tag`` again, the rest is removed.
    Between any two steps ``latest`` names a whole checkpoint and the one before is whole, under one name or the
    other; :meth:`begin` and :func:`find` take up where a killed job left off.
    """

    def __init__(self, save_dir: str, tag: str) -> None:
        self._save_dir = save_dir
        self._tag = tag
        self._path = os.path.join(save_dir, tag)
        self.temporary = os.path.join(save_dir, f".{tag}.writing")
        self._links = os.path.join(save_dir, f".{tag}.links")
        self._junk = os.path.join(save_dir, f".{tag}.junk")
        self._replacing = os.path.join(save_dir, _replacing(tag))
        self._replaced = os.path.join(save_dir, _replaced(tag))

    def begin(self) -> None:
        """An empty temporary folder."""
        os.makedirs(self._save_dir, exist_ok=True)
        if os.path.isdir(self._replacing):
            self._replace()
        for leftover in (self.temporary, self._links, self._junk):
            _remove(leftover)
        os.makedirs(os.path.join(self.temporary, FOLDER))

    def commit(self, save_latest: bool) -> None:
        """The temporary folder is whole: give it its name."""
        sync(os.path.join(self.temporary, FOLDER))
        sync(self.temporary)
        if os.path.lexists(self._path):
            os.rename(self.temporary, self._replacing)
            self._replace()
        else:
            os.rename(self.temporary, self._path)
        sync(self._save_dir)
        if save_latest:
            write_latest(self._save_dir, self._tag)

    def discard(self) -> None:
        _remove(self.temporary)

    def _replace(self) -> None:
        """``tag.replacing`` is whole. Every step can be the first that is left to do."""
        if read_latest(self._save_dir) == self._tag:
            write_latest(self._save_dir, _replacing(self._tag))
        if os.path.lexists(self._path) and not os.path.isdir(self._replaced):
            os.rename(self._path, self._replaced)
        if not os.path.lexists(self._path):
            _remove(self._links)
            shutil.copytree(self._replacing, self._links, copy_function=_link)
            os.rename(self._links, self._path)
            sync(self._save_dir)
        if read_latest(self._save_dir) == _replacing(self._tag):
            write_latest(self._save_dir, self._tag)
        for done in (self._replacing, self._replaced):
            _remove(self._junk)
            os.rename(done, self._junk)  # what is removed bit by bit must not look like a checkpoint
        _remove(self._junk)


def find(save_dir: str, tag: str) -> str | None:
    """The folder of a tag: also where a job was killed while it replaced it. None: there is none."""
    for name in (tag, _replacing(tag), _replaced(tag)):
        if os.path.isdir(os.path.join(save_dir, name)):
            return os.path.join(save_dir, name)
    return None


def read_latest(save_dir: str) -> str | None:
    """The tag that ``latest`` names; None without such a file."""
    path = os.path.join(save_dir, LATEST)
    if not os.path.isfile(path):
        return None
    with open(path) as file:
        return file.read().strip()


def write_latest(save_dir: str, tag: str) -> None:
    temporary = os.path.join(save_dir, f".{LATEST}.writing")
    with open(temporary, "w") as file:
        file.write(tag)
    sync(temporary)
    os.replace(temporary, os.path.join(save_dir, LATEST))
    sync(save_dir)


def sync(path: str) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replacing(tag: str) -> str:
    return f"{tag}.replacing"


def _replaced(tag: str) -> str:
    return f"{tag}.replaced"


def _remove(folder: str) -> None:
    if os.path.isdir(folder):
        shutil.rmtree(folder)


def _link(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:  # a file system without hard links
        shutil.copy2(source, destination)
