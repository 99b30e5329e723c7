"""Token ids of documents, in arrays of Arrow that map the files of a cache."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_dynmo.data.order import Numbers

__all__ = ["Column", "Tokens"]

SAMPLED = 2**12  # tokens: each may bring 128 KiB around it from the disk


class Column:
    """A value for each token. What is read is copied; the rest stays in the files that the arrays map.

    Args:
        arrays: of Arrow, one after the other.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = [array for array in arrays if len(array)]
        self._ends = list(accumulate(map(len, self._arrays)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the values from ``start`` up to ``stop``, at least one."""
        number, pieces = bisect_right(self._ends, start), []
        while start < stop:
            array, end = self._arrays[number], self._ends[number]
            pieces.append(array.slice(len(array) - (end - start), stop - start).to_numpy(zero_copy_only=False))
            start, number = end, number + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def count(self, starts: Numbers, stops: Numbers) -> Numbers:
        """Count the values that are true from each of ``starts`` up to its stop, with one array in memory at a time."""
        places = np.concatenate((starts, stops))
        order = np.argsort(places)
        ordered, before = places[order], np.zeros(len(places), np.int64)
        first = place = true = 0
        for array, end in zip(self._arrays, self._ends):
            counts = np.concatenate(([0], np.cumsum(array.to_numpy(zero_copy_only=False), dtype=np.int64)))
            last = int(np.searchsorted(ordered, end, side="right"))
            before[order[place:last]] = true + counts[ordered[place:last] - first]
            first, place, true = end, last, true + int(counts[-1])
        return before[len(starts) :] - before[: len(starts)]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents, one after the other.

    Attributes:
        name: where they came from, for messages.
        starts: where documents begin, and at the end ``len(ids)``.
        trained: is a token trained, if another one is before it in its document? None: every one is.
        trained_tokens: how many are; None: all.
    """

    name: str
    ids: Column
    starts: Numbers
    trained: Column | None = None
    trained_tokens: int | None = None

    @cached_property
    def sample(self) -> str:
        """Digest of ids at equal distances, by which other data of the same length is seen without reading all."""
        places = range(0, len(self.ids), -(-len(self.ids) // SAMPLED))
        sample = np.concatenate([self.ids.read(place, place + 1) for place in places])
        return hashlib.sha256(sample.astype("<i8").tobytes()).hexdigest()[:16]


def tokens_of(table: Any, name: str) -> Tokens:
    """Return the tokens of a table of Arrow, whose rows have ``input_ids`` and ``trained``."""
    ids, trained = table["input_ids"].chunks, [chunk.flatten() for chunk in table["trained"].chunks]
    lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in ids])
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    tokens = Tokens(name, Column([chunk.flatten() for chunk in ids]), starts)
    count = sum(chunk.true_count for chunk in trained)
    if count == len(tokens.ids):
        return tokens
    return Tokens(name, tokens.ids, starts, Column(trained), count)
