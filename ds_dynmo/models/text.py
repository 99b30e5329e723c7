"""Bytes of real text as training data: every micro-batch is reached by its number.

A text is not held in memory: the bytes of a micro-batch are read from its files. They come in the order in which token
ids come (:mod:`ds_dynmo.data.batches`).
"""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ds_dynmo.data.batches import VALIDATION_SHARE, Sampling, Split, TokenBatches, windows
from ds_dynmo.data.order import Numbers
from ds_dynmo.data.rows import Windows
from ds_dynmo.errors import ConfigError
from ds_dynmo.files.texts import read_errors_as_config_error, text_files

__all__ = ["Batches", "ByteText", "FileBytes", "load_text"]

STDLIB_BYTES = 16 * 2**20  # enough to learn from, read in a fraction of a second
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
MAPPED_FILES = 64  # at a time: systems have a limit


class FileBytes:
    """Bytes of files, one after the other, of which those that are read are mapped into memory.

    Args:
        most: how many; None: all.

    Attributes:
        files: those that the bytes are in.
    """

    def __init__(self, files: Iterable[Path], most: int | None = None) -> None:
        self.files: list[Path] = []
        begins = [0]
        for file in files:
            with read_errors_as_config_error(file), file.open("rb") as content:
                begins.append(begins[-1] + os.fstat(content.fileno()).st_size)
            self.files.append(file)
            if most is not None and begins[-1] >= most:
                break
        self._begins, self._ends = begins, begins[1:]
        self._count = begins[-1] if most is None else min(most, begins[-1])
        self._map = lru_cache(maxsize=MAPPED_FILES)(_mapped)

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the bytes from ``start`` up to ``stop``, at least one."""
        pieces = []
        while start < stop:
            number = bisect_right(self._begins, start) - 1  # of the file, which is not empty
            begin, end = self._begins[number], min(stop, self._ends[number])
            pieces.append(self._map(self.files[number])[start - begin : end - begin])
            start = end
        return np.concatenate(pieces)

    def piece(self, start: int, count: int) -> bytes:
        """Read up to ``count`` bytes of one file, without mapping it."""
        number = bisect_right(self._begins, start) - 1
        file = self.files[number]
        with read_errors_as_config_error(file), file.open("rb", buffering=0) as content:
            content.seek(start - self._begins[number])
            return content.read(count)

    def pieces(self) -> Iterator[bytes]:
        """Iterate over all bytes, a megabyte at a time."""
        left = self._count
        for file in self.files:
            with read_errors_as_config_error(file), file.open("rb") as content:
                while piece := content.read(min(left, 2**20)):
                    left -= len(piece)
                    yield piece


class Batches(TokenBatches):
    """Micro-batches of one split of a text, of which every byte is a token."""

    rows: Windows

    def starts(self, number: int) -> Numbers:
        """Return the places where the sequences of a micro-batch begin."""
        return self.rows.starts(self.sequence_indices(number))


class ByteText:
    """A text as bytes, cut into equal stretches whose last twentieth is for validation.

    Args:
        tokens: its bytes, uint8 if they are a tensor.
        name: where the text came from, for messages.
    """

    def __init__(self, tokens: torch.Tensor | FileBytes, name: str) -> None:
        self.tokens, self.name = tokens, name

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the bytes from ``start`` up to ``stop``, at least one."""
        tokens = self.tokens
        return tokens.read(start, stop) if isinstance(tokens, FileBytes) else tokens[start:stop].numpy()

    def batches(
        self,
        split: Split,
        *,
        micro_batch_size: int,
        sequence_length: int,
        seed: int,
        replica: int = 0,
        replicas: int = 1,
        sampling: Sampling = "random",
    ) -> Batches:
        """Return the micro-batches of one split for one data-parallel replica.

        Args:
            sampling: "random": sequences from random places. "epochs": sequences side by side, put into micro-batches
                once, which come in another order in each epoch.

        Raises:
            ConfigError: the text is too short for ``sequence_length``, or in epochs for a micro-batch.
        """
        rows = windows(self, self.name, split, sequence_length, sampling, VALIDATION_SHARE, unit="bytes")
        if sampling == "epochs" and len(rows) < micro_batch_size:
            raise ConfigError(
                f"{self.name}: {len(rows)} sequences of {sequence_length} bytes are too few for a micro-batch of "
                f"{micro_batch_size} ({split})"
            )
        return Batches(rows, micro_batch_size, sampling, (split, seed), replica, replicas, loss="micro_batch_mean")

    def check_length(self, sequence_length: int) -> None:
        """Refuse a text whose validation part does not hold one sequence and the byte that follows it.

        Raises:
            ConfigError: says how many bytes it needs.
        """
        windows(self, self.name, "validation", sequence_length, "random", VALIDATION_SHARE, unit="bytes")


def load_text(path: str | os.PathLike[str] | None = None) -> ByteText:
    """Open a text.

    Args:
        path: a file, or a folder of which every regular file at any depth counts whatever its suffix, in the order of
            their names. None: the sources of Python's standard library, without its tests, up to 16 MiB.

    Raises:
        ConfigError: no such path, a file or folder that cannot be read, or not one byte in it.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in sorted(root.rglob("*.py")) if not STDLIB_EXCLUDED & set(file.relative_to(root).parts)]
        return _open(files, str(root), STDLIB_BYTES)
    return _open(text_files(Path(path)), str(Path(path)), None)


def _mapped(file: Path) -> npt.NDArray[np.uint8]:
    return np.memmap(file, dtype=np.uint8, mode="r")


def _open(files: Iterable[Path], name: str, most_bytes: int | None) -> ByteText:
    content = FileBytes(files, most_bytes)
    if not len(content):
        raise ConfigError(f"{name}: there is not one byte of text in it")
    return ByteText(content, name)
