"""Bytes of real text as training data: every micro-batch is reached by its number.

A text is not held in memory: the bytes of a micro-batch are read from its files.

The n-th micro-batch depends on (seed, n, replica, replicas) alone. The first and the last stage, which read inputs and
labels each for themselves, agree without communication, and a resumed run goes on with what would have come next.
"""

from __future__ import annotations

import copy
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from ds_dynmo.errors import ConfigError
from ds_dynmo.files.texts import read_errors_as_config_error, text_files
from ds_dynmo.models.seeding import generator_for

__all__ = ["Batches", "ByteText", "EpochBatches", "FileBytes", "RandomBatches", "Sampling", "load_text"]

Sampling = Literal["random", "epochs"]

STDLIB_BYTES = 16 * 2**20  # enough to learn from, read in a fraction of a second
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
STRETCH_BYTES = 2**20
MAPPED_FILES = 64  # at a time: systems have a limit
VALIDATION_SHARE = 20  # one byte in 20


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
        self._begins = np.array(begins)
        self._count = begins[-1] if most is None else min(most, begins[-1])
        self._map = lru_cache(maxsize=MAPPED_FILES)(_mapped)

    def __len__(self) -> int:
        return self._count

    def first(self, count: int) -> FileBytes:
        """Return the first ``count`` bytes."""
        fewer = copy.copy(self)
        fewer._count = count
        return fewer

    def __getitem__(self, places: torch.Tensor) -> torch.Tensor:
        """Return the bytes at ``places``, int64 of any shape, as uint8."""
        wanted = places.numpy().ravel()
        found = np.empty(len(wanted), dtype=np.uint8)
        numbers = np.searchsorted(self._begins, wanted, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        for of_file in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            number = numbers[of_file[0]]
            found[of_file] = self._map(self.files[number])[wanted[of_file] - self._begins[number]]
        return torch.from_numpy(found).view(places.shape)

    def piece(self, start: int, count: int) -> bytes:
        """Read up to ``count`` bytes of one file, without mapping it."""
        number = int(np.searchsorted(self._begins, start, side="right")) - 1
        file = self.files[number]
        with read_errors_as_config_error(file), file.open("rb", buffering=0) as content:
            content.seek(start - int(self._begins[number]))
            return content.read(count)

    def pieces(self) -> Iterator[bytes]:
        """Iterate over all bytes, a megabyte at a time."""
        left = self._count
        for file in self.files:
            with read_errors_as_config_error(file), file.open("rb") as content:
                while piece := content.read(min(left, 2**20)):
                    left -= len(piece)
                    yield piece


@dataclass(frozen=True)
class Batches(ABC):
    """Micro-batches of sequences from one split of a text.

    Attributes:
        tokens: the whole text.
    """

    tokens: torch.Tensor | FileBytes
    sequence_length: int
    key: tuple[int | str, ...]

    @abstractmethod
    def starts(self, number: int) -> torch.Tensor:
        """Return the places where the sequences of a micro-batch begin, int64 ``[micro_batch_size]``."""

    def micro_batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels, int64 ``[micro_batch_size, sequence_length]``: labels are inputs one byte on."""
        windows = self.tokens[self.starts(number).unsqueeze(1) + torch.arange(self.sequence_length + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def iterate(self, first: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over micro-batches ``first``, ``first + 1``, ... without end."""
        while True:
            yield self.micro_batch(first)
            first += 1


@dataclass(frozen=True)
class RandomBatches(Batches):
    """Sequences from random places: none comes again, but by chance."""

    stretch: int
    start: int
    starts_per_stretch: int
    micro_batch_size: int

    def starts(self, number: int) -> torch.Tensor:
        """See :class:`Batches`."""
        stretches = len(self.tokens) // self.stretch
        draws = torch.randint(
            stretches * self.starts_per_stretch, (self.micro_batch_size,), generator=generator_for(*self.key, number)
        )
        return self.start + draws // self.starts_per_stretch * self.stretch + draws % self.starts_per_stretch


@dataclass(frozen=True)
class EpochBatches(Batches):
    """Every epoch the same micro-batches, in another order.

    Attributes:
        epoch: where the sequences of all micro-batches begin, int64 ``[micro-batches, micro_batch_size]``.
    """

    epoch: torch.Tensor

    def starts(self, number: int) -> torch.Tensor:
        """See :class:`Batches`."""
        epoch, position = divmod(number, len(self.epoch))
        return self.epoch[_shuffled(len(self.epoch), *self.key, epoch)[position]]


class ByteText:
    """A text as bytes, cut into equal stretches whose last twentieth is for validation.

    Args:
        tokens: its bytes, uint8 if they are a tensor.
        name: where the text came from, for messages.
    """

    def __init__(self, tokens: torch.Tensor | FileBytes, name: str) -> None:
        stretches = max(1, len(tokens) // STRETCH_BYTES)
        self.stretch = len(tokens) // stretches
        count = stretches * self.stretch
        self.tokens = tokens.first(count) if isinstance(tokens, FileBytes) else tokens[:count]
        self.name = name

    def batches(
        self,
        split: Literal["train", "validation"],
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
                once; every replica has a share of those, and sees all of it in each epoch before one comes again.

        Raises:
            ConfigError: the text is too short for ``sequence_length``, or for a micro-batch for each replica.
        """
        self.check_length(sequence_length)
        validation = self.stretch // VALIDATION_SHARE
        start, length = (0, self.stretch - validation) if split == "train" else (self.stretch - validation, validation)
        if sampling == "random":
            return RandomBatches(
                tokens=self.tokens,
                stretch=self.stretch,
                start=start,
                starts_per_stretch=length - sequence_length,
                micro_batch_size=micro_batch_size,
                sequence_length=sequence_length,
                key=(split, seed, replica),
            )
        within = torch.arange((length - 1) // sequence_length) * sequence_length
        starts = (torch.arange(start, len(self.tokens), self.stretch).unsqueeze(1) + within).flatten()
        micro_batches = len(starts) // micro_batch_size // replicas
        if not micro_batches:
            raise ConfigError(
                f"{self.name}: {len(starts)} sequences of {sequence_length} bytes are too few: an epoch with a "
                f"micro-batch for each of {replicas} replicas needs {micro_batch_size * replicas}"
            )
        shuffled = starts[_shuffled(len(starts), split, seed)][: micro_batches * replicas * micro_batch_size]
        return EpochBatches(
            tokens=self.tokens,
            sequence_length=sequence_length,
            key=(split, seed, replica),
            epoch=shuffled.view(micro_batches, replicas, micro_batch_size)[:, replica],
        )

    def check_length(self, sequence_length: int) -> None:
        """Refuse a text whose validation part does not hold one sequence and the byte that follows it.

        Raises:
            ConfigError: says how many bytes it needs.
        """
        needed = VALIDATION_SHARE * (sequence_length + 1)
        if self.stretch < needed:
            raise ConfigError(
                f"{self.name}: {len(self.tokens)} bytes are too few: one sequence of {sequence_length} bytes "
                f"in the {100 // VALIDATION_SHARE}% kept for validation needs {needed}"
            )


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


@lru_cache(maxsize=2)
def _shuffled(count: int, *key: int | str) -> torch.Tensor:
    """Shuffle the numbers below ``count``, in an order that depends on ``key`` alone."""
    return torch.randperm(count, generator=generator_for(*key, "order"))


def _open(files: Iterable[Path], name: str, most_bytes: int | None) -> ByteText:
    content = FileBytes(files, most_bytes)
    if not len(content):
        raise ConfigError(f"{name}: there is not one byte of text in it")
    return ByteText(content, name)
