"""The files of a checkpoint: each is checked before it is read, and read once."""

from __future__ import annotations

import os
from typing import Any

from ds_dynmo.engine.save.manifest import MANIFEST, Manifest, SliceManifest
from ds_dynmo.engine.save.safe_load import check_file, checksums_in, find_damaged, refuse_damaged, safe_load
from ds_dynmo.errors import CheckpointError


class MappedFile:
    """A file whose tensors stay on the disk until they are copied.

    Attributes:
        content: what it holds. Its tensors may be damaged.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.content: Any = safe_load(path, mapped=True, checks_values=False)
        self._checksums = checksums_in(path)
        self._compared: set[int] = set()

    def take(self, part: Any) -> Any:
        """Return a part of the content, in dicts or lists of its own or not, once its tensors are found undamaged.

        Raises:
            CheckpointError: naming the tensor. Other tensors of the file were not read.
        """
        if self._checksums is not None:
            refuse_damaged(find_damaged(part, self._checksums, self._compared), self.content, self._path)
        return part


class SavedCheckpoint:
    """The files of a checkpoint, for one tensor-parallel slice.

    Attributes:
        manifest: what they are; made up of a checkpoint of stock DeepSpeed.
    """

    def __init__(self, folder: str, manifest: Manifest, slice_index: int) -> None:
        self._folder = folder
        self.manifest = manifest
        self.slice_index = slice_index
        self._open: dict[str, MappedFile] = {}

    @property
    def slice(self) -> SliceManifest:
        """The saved files of this rank's tensor-parallel slice."""
        return self.manifest.slices[self.slice_index]

    def described_by(self, manifest: Manifest) -> SavedCheckpoint:
        """Return the same files, described by another manifest."""
        return SavedCheckpoint(self._folder, manifest, self.slice_index)

    def path(self, name: str) -> str:
        """Return the path of a file, for messages."""
        return os.path.join(self._folder, name)

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a file of this name."""
        return os.path.isfile(self.path(name)) if self.manifest.stock else name in self.manifest.files

    def open(self, name: str) -> MappedFile:
        """Open a file by its path in the folder."""
        if name not in self._open:
            self._open[name] = MappedFile(self._checked(name))
        if name.startswith("mp_rank_") and not isinstance(self._open[name].content, dict):
            raise CheckpointError(f"{self.path(name)}: is not a file of DeepSpeed's")
        return self._open[name]

    def read(self, name: str) -> Any:
        """Read a whole file by its path in the folder; tensors are on the CPU, mapped from the file."""
        return self.open(name).take(self.open(name).content)

    def read_to(self, device: Any, name: str) -> Any:
        """Read a whole file with tensors in memory; on ``device``, if they were on one when saved."""
        return safe_load(self._checked(name), device=device)

    def _checked(self, name: str) -> str:
        if not self.manifest.stock and name not in self.manifest.files:
            raise CheckpointError(f"{self.path(name)}: {MANIFEST} does not list it")
        return check_file(self.path(name), self.manifest.files.get(name))
