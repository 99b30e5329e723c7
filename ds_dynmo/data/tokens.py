"""Token ids of a text, and the check of all of them before training begins."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_dynmo.data.order import Numbers
from ds_dynmo.errors import ConfigError

__all__ = ["IdStatistics", "Ids", "LogProgress", "Tokens", "check_ids", "log_nothing", "scan_ids", "sometimes"]

Ids = Sequence[int] | Numbers  # of one document
LogProgress = Callable[[str], None]

TOKENS_AT_ONCE = 2**24  # tokens that are looked at together
SAMPLED = 2**12  # tokens: each may bring 128 KiB around it from the disk
SECONDS_PER_LINE = 5.0


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids of a text, in memory or in a file that is mapped into it.

    Attributes:
        ids: integers, one after the other.
        name: where they came from, for messages.
        starts: where documents begin, and at the end ``len(ids)``; None: unknown.
        end_of_document: the id that ends each document, where ``starts`` is still to be found by it.
    """

    ids: NDArray[Any]
    name: str
    starts: Numbers | None = None
    end_of_document: int | None = None

    @cached_property
    def file(self) -> Path | None:
        """The file that ``ids`` map, all of it; None: they are something else."""
        ids = self.ids
        if not isinstance(ids, np.memmap) or ids.filename is None or not ids.flags.c_contiguous:
            return None
        file = Path(ids.filename)
        return file if file.stat().st_size == ids.nbytes else None

    @cached_property
    def sample(self) -> str:
        """Digest of ids at equal distances, by which other data of the same length is seen without reading all."""
        sample = self.ids[:: -(-len(self.ids) // SAMPLED)].astype("<i8")
        return hashlib.sha256(sample.tobytes()).hexdigest()[:16]


def log_nothing(line: str) -> None:
    """Drop the line: another rank says it."""


def sometimes(log_progress: LogProgress) -> LogProgress:
    """Return a function that says a line when none was said for some seconds; a quick task says nothing."""
    last = time.monotonic()

    def pass_on(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_PER_LINE:
            last = time.monotonic()
            log_progress(line)

    return pass_on


@dataclass(frozen=True, eq=False)
class IdStatistics:
    """What there is to know of all ids of a text.

    Attributes:
        least, most: the smallest and the largest id.
        starts: where documents begin, and at the end the number of ids; None: nothing says where they end.
    """

    least: int
    most: int
    starts: Numbers | None


def scan_ids(tokens: Tokens, log_progress: LogProgress = log_nothing) -> IdStatistics:
    """Read every id, of a mapped file a chunk at a time, so that the rest of it need not stay in memory.

    Args:
        log_progress: called every few seconds with a line about how far this is.
    """
    ids, end = tokens.ids, tokens.end_of_document
    progress, least, most = sometimes(log_progress), [], []
    found: list[Numbers] = [np.zeros(1, np.int64)]
    for first in range(0, len(ids), TOKENS_AT_ONCE):
        chunk = _read(tokens, first, TOKENS_AT_ONCE)
        least.append(int(chunk.min()))
        most.append(int(chunk.max()))
        if end is not None:
            found.append(first + 1 + np.flatnonzero(chunk == end))
        done = first + len(chunk)
        progress(f"{tokens.name}: checked {done:,} of {len(ids):,} tokens ({done / len(ids):.0%})")
    starts = None if end is None else np.unique(np.concatenate([*found, [len(ids)]])).astype(np.int64)
    return IdStatistics(min(least), max(most), starts)


def check_ids(
    tokens: Tokens,
    vocabulary: int,
    log_progress: LogProgress = log_nothing,
    scan: Callable[[Tokens, LogProgress], IdStatistics] = scan_ids,
) -> Tokens:
    """Check every id, and find the documents where ``end_of_document`` ends them.

    Args:
        vocabulary: ids have to be below it.
        log_progress: called every few seconds with a line about how far the check is.
        scan: reads the ids, or knows what is in them.

    Raises:
        ConfigError: naming the first id that the model does not know, its position, and what is allowed; or an
            ``end_of_document`` that it does not know.
    """
    ids, end = tokens.ids, tokens.end_of_document
    if end is not None and end >= vocabulary:
        raise ConfigError(
            f"{tokens.name}: end_of_document = {end}: the model's vocabulary has {vocabulary} entries, 0 to "
            f"{vocabulary - 1}"
        )
    if not len(ids):
        raise ConfigError(f"{tokens.name}: there is not one token in it")
    found = scan(tokens, log_progress)
    if found.most >= vocabulary or found.least < 0:
        place, wrong = _first_outside(ids, vocabulary)
        raise ConfigError(
            f"{tokens.name}: token {place} of {len(ids)} is {wrong}: the model's vocabulary has {vocabulary} entries, "
            f"0 to {vocabulary - 1}"
        )
    return tokens if tokens.starts is not None or found.starts is None else replace(tokens, starts=found.starts)


def _first_outside(ids: NDArray[Any], vocabulary: int) -> tuple[int, int]:
    """Find the first id outside the vocabulary, and its position."""
    for first in range(0, len(ids), TOKENS_AT_ONCE):
        chunk = ids[first : first + TOKENS_AT_ONCE]
        outside = np.flatnonzero((chunk >= vocabulary) | (chunk < 0))
        if len(outside):
            return first + int(outside[0]), int(chunk[outside[0]])
    raise AssertionError("every id is in the vocabulary")


def _read(tokens: Tokens, first: int, count: int) -> NDArray[Any]:
    """Return some ids; of a mapped file read into memory of their own."""
    ids = tokens.ids
    if tokens.file is None:
        return ids[first : first + count]
    return np.fromfile(tokens.file, dtype=ids.dtype, count=count, offset=first * ids.itemsize)
