"""Make a checkpoint appear as a whole or not at all: write to a temporary folder, then rename."""

from __future__ import annotations

import glob
import math
import os
import shutil
from contextlib import suppress

from ds_dynmo.files import path_in_errors
from ds_dynmo.files.checkpoints import FOLDER

LATEST = "latest"
ABANDONED_SECONDS = 3600.0  # a temporary folder without writes for so long is abandoned
_WRITING = ".writing"


class CheckpointFolder:
    """The folder ``save_dir/tag``, and those beside it while it is written. Only one rank uses it.

    A new tag appears with one rename. A folder cannot be renamed over another, so a tag that exists is replaced in
    steps. If a job is killed between two of them, :func:`find` takes the first of these names that exists, which holds
    the old checkpoint or the new one, and the next :meth:`begin` finishes the rest:

    ========  ==================  =================  =================  ==============================================
    ``tag``   ``tag.replacing``   ``tag.replaced``   ``latest``         next
    ========  ==================  =================  =================  ==============================================
    old                                              tag                ``.tag.writing`` becomes ``tag.replacing``
    old       new                                    tag                ``latest`` names ``tag.replacing``
    old       new                                    tag.replacing      ``tag`` becomes ``tag.replaced``
    .         new                 old                tag.replacing      hard links to the new one become ``tag``
    new       new                 old                tag.replacing      ``latest`` names ``tag``
    new       new                 old                tag                ``tag.replacing`` is removed
    new                           old                tag                ``tag.replaced`` is removed
    new                                              tag                done
    ========  ==================  =================  =================  ==============================================

    If ``latest`` names another tag, it stays. A folder is renamed to a hidden name before it is removed.
    """

    def __init__(self, save_dir: str, tag: str) -> None:
        self._save_dir = save_dir
        self._tag = tag
        self._made: list[str] = []
        self._path = os.path.join(save_dir, tag)
        self.temporary = os.path.join(save_dir, f".{tag}{_WRITING}")
        self._links = os.path.join(save_dir, f".{tag}.links")
        self._junk = os.path.join(save_dir, f".{tag}.junk")
        self._replacing = os.path.join(save_dir, _replacing(tag))
        self._replaced = os.path.join(save_dir, _replaced(tag))

    def begin(self) -> None:
        """Make an empty temporary folder, and finish what killed jobs left of this tag."""
        self._made = _missing_folders(self._save_dir)
        os.makedirs(self._save_dir, exist_ok=True)
        if os.path.isdir(self._replacing):
            self._replace()
        elif os.path.lexists(self._path):
            self._drop(self._replaced)
        for leftover in (self.temporary, self._links, self._junk):
            _remove(leftover)
        os.makedirs(os.path.join(self.temporary, FOLDER))
        self._remove_abandoned()

    def commit(self, save_latest: bool) -> None:
        """Rename the complete temporary folder to its final name."""
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
        """Remove the temporary folder, and the folders that :meth:`begin` made for it."""
        _remove(self.temporary)
        for folder in self._made:
            with suppress(OSError):  # another job writes there by now
                os.rmdir(folder)

    def _replace(self) -> None:
        """Replace ``tag`` by ``tag.replacing``, which is complete. Earlier steps may be done already."""
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
        self._drop(self._replacing)
        self._drop(self._replaced)

    def _drop(self, folder: str) -> None:
        if os.path.isdir(folder):
            _remove(self._junk)
            os.rename(folder, self._junk)  # a folder that is half removed must not look like a checkpoint
            _remove(self._junk)

    def _remove_abandoned(self) -> None:
        """Remove what killed jobs left of tags that are never written again, such as ``global_step7`` after a restart.

        Another job may be writing other tags to ``save_dir`` now: its folder changes all the time. Ages are by the file
        system's clock.
        """
        now = os.stat(self.temporary).st_mtime
        for path in glob.glob(os.path.join(glob.escape(self._save_dir), f".*{_WRITING}", FOLDER)):
            folder = os.path.dirname(path)
            if now - _last_change(folder) > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def find(save_dir: str, tag: str) -> str | None:
    """Find the folder of a tag, also after a job was killed while replacing it. None: there is none."""
    for name in (tag, _replacing(tag), _replaced(tag)):
        if os.path.isdir(os.path.join(save_dir, name)):
            return os.path.join(save_dir, name)
    return None


def tag_of(name: str) -> str | None:
    """Return the tag of which a folder of this name may hold the checkpoint; None: a temporary folder.

    >>> tag_of("global_step7"), tag_of("global_step7.replacing"), tag_of(".global_step7.writing")
    ('global_step7', 'global_step7', None)
    """
    return None if name.startswith(".") else name.removesuffix(_replacing("")).removesuffix(_replaced(""))


def read_latest(save_dir: str, name: str = LATEST) -> str | None:
    """Read the tag that ``latest``, or a file of another ``name``, has; None: there is no such file."""
    path = os.path.join(save_dir, name)
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


def _replacing(tag: str) -> str:
    return f"{tag}.replacing"


def _replaced(tag: str) -> str:
    return f"{tag}.replaced"


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


def _missing_folders(path: str) -> list[str]:
    """List a folder and those above it that are not there, the innermost first."""
    missing = []
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def _remove(folder: str) -> None:
    if os.path.isdir(folder):
        shutil.rmtree(folder)


def _link(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:  # a file system without hard links
        shutil.copy2(source, destination)
