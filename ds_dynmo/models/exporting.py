"""Read the files of a checkpoint in one process, one layer after the other, and write others beside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.files import atomic_write, why_unreadable

__all__ = ["check_is_new", "load", "new_folder", "tag_folder", "weights_file"]


def tag_folder(checkpoint: Path) -> Path:
    """Find the folder of the latest tag, where ``checkpoint`` is not one itself.

    Raises:
        CheckpointError: there is no such folder.
    """
    latest = checkpoint / "latest"
    if latest.is_file():
        return checkpoint / latest.read_text().strip()
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: there is no such folder")
    return checkpoint


def weights_file(layer: int) -> str:
    """Name the file of a layer's weights, DeepSpeed's.

    >>> weights_file(3)
    'layer_03-model_states.pt'
    """
    return f"layer_{layer:02d}-model_states.pt"


def load(path: Path) -> dict[str, Any]:
    """Load a file, without running code in it.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"{path}: cannot be read: {why_unreadable(error)}") from error
    return content


def check_is_new(folder: Path) -> None:
    """Refuse a folder that something is in.

    Raises:
        ConfigError: with its path.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is there already: it should be an empty folder, or not exist")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``folder`` when the body ends, and is removed if it fails.

    Raises:
        ConfigError: something is in ``folder``.
        CheckpointError: it could not be written.
    """
    check_is_new(folder)
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder) as new:
            new.mkdir()
            yield new
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error
