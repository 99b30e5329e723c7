"""Read a file without running code from it, and detect one that is truncated or replaced."""

from __future__ import annotations

import argparse
import hashlib
import os
import zipfile
import zlib
from typing import Any

import torch
from torch.serialization import safe_globals

from ds_dynmo.engine.checkpoint.layout import SavedFile
from ds_dynmo.engine.deepspeed_adapter.files import PICKLED, ZeroStageEnum
from ds_dynmo.errors import CheckpointError
from ds_dynmo.files import why_unreadable

# Beyond what torch allows (tensors, OrderedDict, Counter, set, torch.Size, ...): plain containers of values that
# DeepSpeed or its users put into checkpoints. Constructing them runs no other code.
_CLASSES = (*PICKLED, argparse.Namespace, frozenset)


def _member(enum: Any, name: str) -> Any:
    """Replace ``getattr`` in a file, by which some Pythons (3.11.2) pickle a member of an enum."""
    if enum is not ZeroStageEnum:
        raise CheckpointError(f"it reads an attribute of {enum!r}")
    return ZeroStageEnum[name]


_ALLOWED = (*_CLASSES, (_member, "builtins.getattr"))


def safe_load(path: str, *, device: torch.device | None = None, mapped: bool = False) -> Any:
    """Load what ``torch.save`` wrote to ``path``, of allowed classes only.

    Args:
        device: for tensors that were not on the CPU when they were saved; None: the CPU.
        mapped: leave tensors in the file until they are copied.

    Raises:
        CheckpointError: the file is missing or damaged, or holds a class that is not allowed.
    """

    def place(storage: Any, location: str) -> Any:
        return storage if device is None or location == "cpu" else storage.to(device=device)

    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: there is no such file")
    try:
        with safe_globals(list(_ALLOWED)):
            return torch.load(path, map_location=place, weights_only=True, mmap=mapped and zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = why_unreadable(error)
    if "unsupported" in text.lower():  # torch refuses a class: keep only that part of its long message
        refused = text.rpartition("trusted source.")[2].rpartition("error:")[2].partition(" Please")[0].strip()
        return f"it holds what could run code: {refused} (torch.serialization.add_safe_globals allows a class of yours)"
    return text[:400]


def describe(path: str) -> SavedFile:
    """Compute size and fingerprint, from the checksums in the file's zip directory: no tensor is read."""
    num_bytes = os.path.getsize(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            parts = sorted((info.filename.partition("/")[2], info.CRC, info.file_size) for info in archive.infolist())
        return SavedFile(num_bytes, hashlib.sha256(repr(parts).encode()).hexdigest()[:32])
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return SavedFile(num_bytes, f"crc32 {checksum:08x}")


def check_file(path: str, saved: SavedFile | None) -> str:
    """Return ``path`` if it is the file that was saved.

    Args:
        saved: None: the checkpoint does not say.

    Raises:
        CheckpointError: it is missing, truncated or replaced.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: there is no such file")
    if saved is None:
        return path
    num_bytes = os.path.getsize(path)
    if num_bytes != saved.num_bytes:
        raise CheckpointError(
            f"{path}: has {num_bytes} bytes, but {saved.num_bytes} were written: truncated or replaced"
        )
    try:
        found = describe(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if found != saved:
        raise CheckpointError(f"{path}: is not the file that was written with this checkpoint (its checksums differ)")
    return path
