"""The files of a checkpoint that has a manifest: each is checked before it is read, and read once."""

from __future__ import annotations

import os
from typing import Any

from ds_dynmo.engine.save.manifest import MANIFEST, Manifest, SliceManifest
from ds_dynmo.engine.save.safe_load import check_file, safe_load
from ds_dynmo.errors import CheckpointError


class SavedCheckpoint:
    """The files of a checkpoint, for one tensor-parallel slice.

    Attributes:
        manifest: what they are; made up of a checkpoint of stock DeepSpeed.
    """

    def __init__(self, folder: str, manifest: Manifest, slice_index: int) -> None:
        self._folder = folder
        self.manifest = manifest
        self.slice_index = slice_index
        self._read: dict[str, Any] = {}

    @property
    def slice(self) -> SliceManifest:
        """The saved files of this rank's tensor-parallel slice."""
        return self.manifest.slices[self.slice_index]

    def path(self, name: str) -> str:
        """Return the path of a file, for messages."""
        return os.path.join(self._folder, name)

    def read(self, name: str) -> Any:
        """Read a file by its path in the folder; tensors are on the CPU, mapped from the file."""
        if name not in self._read:
            self._read[name] = safe_load(self._checked(name), mapped=True)
        if name.startswith("mp_rank_") and not isinstance(self._read[name], dict):
            raise CheckpointError(f"{self.path(name)}: is not a file of DeepSpeed's")
        return self._read[name]

    def read_to(self, device: Any, name: str) -> Any:
        """Read a file like :meth:`read`, with tensors in memory; on ``device``, if they were on one when saved."""
        return safe_load(self._checked(name), device=device)

    def _checked(self, name: str) -> str:
        if not self.manifest.stock and name not in self.manifest.files:
            raise CheckpointError(f"{self.path(name)}: {MANIFEST} does not list it")
        return check_file(self.path(name), self.manifest.files.get(name))
