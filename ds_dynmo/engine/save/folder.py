"""Make a checkpoint appear as a whole or not at all: write to a temporary folder, then rename."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from ds_dynmo.files import path_in_errors
from ds_dynmo.files.checkpoints import FOLDER
from ds_dynmo.files.claims import check_claim, missing_folders

LATEST = "latest"
ABANDONED_SECONDS = 3600.0  # a temporary folder without writes for so long is abandoned
_WRITING, _REMOVED = ".writing", ".dynmo-removed"
_WRITER = (
    ".dynmo-writer.json"  # in a temporary folder: the machine whose process has a lock on this file while it writes
)


class CheckpointFolder:
    """The folder ``save_dir/tag``, and those beside it while it is written. Only one rank uses it.

    A new tag appears with one rename. A folder cannot be renamed over another, so a tag that exists is replaced by two.
    If a job is killed between two steps, :func:`find` finds the old checkpoint or the new one, and the next save or
    load in ``save_dir``, of any tag, does the rest (:func:`tidy`):

    =======  ================  ======================  =====================================================
    ``tag``  ``.tag.writing``  ``.tag.dynmo-removed``  next
    =======  ================  ======================  =====================================================
    old      a part of new                             the rest is written (after a kill: it is removed)
    old      new                                       ``tag`` becomes ``.tag.dynmo-removed`` (or the same)
    .        new               old                     ``.tag.writing`` becomes ``tag``
    new                        old                     ``.tag.dynmo-removed`` is removed
    new                                                done
    =======  ================  ======================  =====================================================

    A folder has the name ``.tag.dynmo-removed`` before it is removed, so that no part of it is taken for a checkpoint.
    """

    def __init__(self, save_dir: str, tag: str) -> None:
        self._save_dir = save_dir
        self._tag = tag
        self._made: list[str] = []
        self._lock: int | None = None
        self._path, self.temporary, self._removed = _paths(save_dir, tag)

    def begin(self) -> None:
        """Make an empty temporary folder, and remove what killed jobs left.

        Raises:
            CheckpointError: another process has claimed ``save_dir``.
        """
        check_claim(self._save_dir)
        self._made = missing_folders(self._save_dir)
        os.makedirs(self._save_dir, exist_ok=True)
        tidy(self._save_dir)
        _clear(self._save_dir, self._tag)  # whoever began it: this job has the tag now
        if os.path.isdir(self._removed):
            shutil.rmtree(self._removed)  # raises why it is still there
        os.makedirs(os.path.join(self.temporary, FOLDER))
        self._lock = _lock(os.path.join(self.temporary, _WRITER))

    def commit(self, save_latest: bool) -> None:
        """Rename the complete temporary folder to its final name."""
        sync(os.path.join(self.temporary, FOLDER))
        sync(self.temporary)
        if os.path.lexists(self._path):
            os.rename(self._path, self._removed)
        os.rename(self.temporary, self._path)
        self._unlock()  # first, as a network file system keeps a file that is open
        _remove(os.path.join(self._path, _WRITER))
        sync(self._save_dir)
        if save_latest:
            write_latest(self._save_dir, self._tag)
        _remove(self._removed)

    def discard(self) -> None:
        """Remove the temporary folder, and the folders that :meth:`begin` made for it."""
        self._unlock()
        _clear(self._save_dir, self._tag)
        for folder in self._made:
            with suppress(OSError):  # another job writes there by now
                os.rmdir(folder)

    def _unlock(self) -> None:
        if self._lock is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a process that was forked meanwhile would keep it
            os.close(self._lock)
            self._lock = None


def find(save_dir: str, tag: str) -> str | None:
    """Find the folder of a tag, also after a job was killed while replacing it. None: there is none."""
    path, temporary, removed = _paths(save_dir, tag)
    if os.path.isdir(path):
        return path
    return temporary if os.path.isdir(temporary) and os.path.lexists(removed) else None


def tag_of(name: str) -> str | None:
    """Return the tag for which :func:`find` may find a folder where one has this name; None: for none.

    >>> tag_of("global_step7"), tag_of(".global_step7.dynmo-removed"), tag_of(".global_step7.writing")
    ('global_step7', 'global_step7', None)
    """
    if not name.startswith("."):
        return name
    return name[1:].removesuffix(_REMOVED) if name.endswith(_REMOVED) else None


def remove(save_dir: str, tag: str) -> None:
    """Remove a checkpoint. No part of it is taken for one, whenever this is killed.

    Raises:
        OSError: it stays, or its files do under a name that is none of a checkpoint.
    """
    path, _, removed = _paths(save_dir, tag)
    os.rename(path, removed)
    shutil.rmtree(removed)


def tidy(save_dir: str) -> None:
    """Remove what killed saves of any tag left, or finish it where all of the new checkpoint was written.

    What a running save is writing stays: another job may write other tags to ``save_dir`` now.
    """
    for name in os.listdir(save_dir) if os.path.isdir(save_dir) else ():
        with suppress(OSError):  # another job does it as well, or this one may only read
            if not name.startswith("."):
                _remove(os.path.join(save_dir, name, _WRITER))
            elif name.endswith(_REMOVED):
                _, temporary, removed = _paths(save_dir, name[1:].removesuffix(_REMOVED))
                if not os.path.isdir(temporary):
                    _remove(removed)
            elif name.endswith(_WRITING) and _is_abandoned(os.path.join(save_dir, name)):
                _clear(save_dir, name[1:].removesuffix(_WRITING))


def read_latest(save_dir: str) -> str | None:
    """Read the tag that ``latest`` has; None: there is no such file."""
    path = os.path.join(save_dir, LATEST)
    if not os.path.isfile(path):
        return None
    with open(path) as file:
        return file.read().strip()


def write_latest(save_dir: str, tag: str) -> None:
    """Write ``tag`` to ``latest``, in one rename."""
    temporary = os.path.join(save_dir, f".{LATEST}.writing")
    with path_in_errors(temporary), open(temporary, "w") as file:
        file.write(tag)
    sync(temporary)
    os.replace(temporary, os.path.join(save_dir, LATEST))
    sync(save_dir)


def sync(path: str) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with path_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _paths(save_dir: str, tag: str) -> tuple[str, str, str]:
    """Return the paths of a tag's folder, of the one that is written, and of the one that is removed."""
    names = (tag, f".{tag}{_WRITING}", f".{tag}{_REMOVED}")
    path, temporary, removed = (os.path.join(save_dir, name) for name in names)
    return path, temporary, removed


def _clear(save_dir: str, tag: str) -> None:
    """Leave only the checkpoint of a tag: the new one, if that was complete when the old one lost its name."""
    path, temporary, removed = _paths(save_dir, tag)
    if find(save_dir, tag) == temporary:
        os.rename(temporary, path)
        _remove(os.path.join(path, _WRITER))
        sync(save_dir)
    elif os.path.isdir(temporary):
        _remove(removed)
        os.rename(temporary, removed)
    _remove(removed)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)  # another job may be removing it as well
    elif os.path.lexists(path):
        with suppress(FileNotFoundError):
            os.unlink(path)


# -- whether a save is running ------------------------------------------------------------------------


def _lock(path: str) -> int:
    """Lock a file for this process, and write there on which machine it runs. The lock ends with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    with suppress(OSError):  # a file system without locks, or another system than Linux
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, _machine())
    return descriptor


def _machine() -> bytes:
    """Return a name of this machine until it boots again."""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()}".encode()


def _is_abandoned(path: str) -> bool:
    """Return whether a path is a temporary folder that no running save is writing.

    A free lock says that the process has ended which began it, if that was on this machine: not every file system shows
    locks of other machines. Those folders, and one with a lock, are abandoned after :data:`ABANDONED_SECONDS` without a
    write, by the file system's clock.
    """
    if not os.path.isdir(os.path.join(path, FOLDER)):
        return False
    with suppress(OSError):
        descriptor = os.open(os.path.join(path, _WRITER), os.O_RDWR)
        try:
            if os.read(descriptor, 1000) == _machine():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        finally:
            os.close(descriptor)
    with tempfile.TemporaryFile(dir=os.path.dirname(path)) as probe:
        return os.fstat(probe.fileno()).st_mtime - _last_change(path) > ABANDONED_SECONDS


def _last_change(folder: str) -> float:
    """Find when a file in a folder was last written, in seconds; a file that just vanished counts as now."""
    times = []
    for path, _, names in os.walk(folder):
        for name in (".", *names):
            try:
                times.append(os.stat(os.path.join(path, name)).st_mtime)
            except FileNotFoundError:
                return math.inf
    return max(times, default=math.inf)
