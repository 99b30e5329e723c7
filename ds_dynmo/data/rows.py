"""Training sequences of a text: windows of its tokens, or documents, packed or one in each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ds_dynmo.data.order import Numbers
from ds_dynmo.data.tokens import Tokens

__all__ = ["IGNORED", "Arrays", "DocumentRows", "Ids", "TokenRows", "Windows", "document_rows", "pack"]

IGNORED = -100  # label of a token that predicts nothing; torch's cross_entropy leaves it out

Arrays = tuple[Numbers, Numbers | None, Numbers]  # ids, position ids (None: 0, 1, ...), labels: ``[rows, length]`` each


class Ids(Protocol):
    """The token ids of a text, one after the other."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the ids from ``start`` up to ``stop``, at least one."""


class TokenRows(Protocol):
    """Sequences of one length, by number."""

    @property
    def trained(self) -> Numbers | None:
        """How many tokens of each sequence are trained; None: all of all."""

    def __len__(self) -> int: ...

    def take(self, numbers: Numbers) -> Arrays:
        """Return some sequences, in the order of ``numbers``."""


@dataclass(frozen=True)
class Windows:
    """Sequences of adjacent tokens, whatever documents these are of. Labels are the ids one token on.

    The text is cut into equal stretches; sequences begin in each stretch at ``first`` and then at every ``step``.

    Attributes:
        each: sequences in a stretch.
    """

    ids: Ids
    length: int
    stretches: int
    stretch: int
    first: int
    step: int
    each: int

    def __len__(self) -> int:
        return self.stretches * self.each

    @property
    def trained(self) -> None:
        """See :class:`TokenRows`."""

    def starts(self, numbers: Numbers) -> Numbers:
        """Return the places where some sequences begin."""
        return numbers // self.each * self.stretch + self.first + numbers % self.each * self.step

    def take(self, numbers: Numbers) -> Arrays:
        """See :class:`TokenRows`."""
        ids = np.stack([self.ids.read(start, start + self.length + 1) for start in self.starts(numbers).tolist()])
        ids = ids.astype(np.int64)
        return ids[:, :-1], None, ids[:, 1:]


@dataclass(frozen=True)
class DocumentRows:
    """Sequences of whole documents, or of pieces of those that are too long, and padding after them.

    Attributes:
        starts, lengths: of pieces, in the order in which they stand in sequences. A piece has ``lengths`` inputs; its
            labels are the ids one token on.
        counts: of each sequence's pieces.
        trained: see :class:`TokenRows`.
        resets: position ids begin at 0 with every piece, and with the padding.
    """

    tokens: Tokens
    length: int
    starts: Numbers
    lengths: Numbers
    counts: Numbers
    trained: Numbers
    resets: bool

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def fill(self) -> float:
        """Share of the tokens of all sequences that is no padding."""
        return float(self.lengths.sum()) / (len(self) * self.length)

    @cached_property
    def _firsts(self) -> Numbers:
        return np.cumsum(self.counts) - self.counts

    def take(self, numbers: Numbers) -> Arrays:
        """See :class:`TokenRows`."""
        shape = (len(numbers), self.length)
        ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, number in enumerate(numbers):
            place, first = 0, self._firsts[number]
            for piece in range(first, first + self.counts[number]):
                start, stop = int(self.starts[piece]), place + int(self.lengths[piece])
                end = start + stop - place + 1
                found = self.tokens.ids.read(start, end)
                ids[row, place:stop], labels[row, place:stop] = found[:-1], found[1:]
                if self.tokens.trained is not None:
                    labels[row, place:stop][~self.tokens.trained.read(start + 1, end)] = IGNORED
                positions[row, place:stop] = np.arange(stop - place)
                place = stop
            positions[row, place:] = np.arange(self.length - place)
        return ids, positions if self.resets else None, labels


def document_rows(tokens: Tokens, documents: Numbers, length: int, *, packed: bool) -> DocumentRows:
    """Put documents into sequences.

    A document of ``n`` tokens has ``n - 1`` inputs, each with the next token as its label. Where these are more than
    ``length``, it is cut into pieces, of which those without a token that is trained are left out. A document of a
    single token has no input and is left out.

    Args:
        documents: numbers of the documents.
        packed: several in a sequence, none divided; else one in each.
    """
    firsts = tokens.starts[documents]
    inputs = np.maximum(np.diff(tokens.starts)[documents] - 1, 0)
    pieces = -(-inputs // length)
    piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(firsts, pieces) + piece * length
    lengths = np.minimum(np.repeat(inputs, pieces) - piece * length, length)
    trained = lengths
    if tokens.trained is not None:
        trained = tokens.trained.count(starts + 1, starts + 1 + lengths)
        starts, lengths, trained = (values[trained > 0] for values in (starts, lengths, trained))
    if not packed:
        return DocumentRows(tokens, length, starts, lengths, np.ones_like(starts), trained, resets=False)
    rows = pack(lengths, length)
    order = np.argsort(rows, kind="stable")
    of_rows = np.bincount(rows, trained).astype(np.int64)
    return DocumentRows(tokens, length, starts[order], lengths[order], np.bincount(rows), of_rows, resets=True)


def pack(lengths: Sequence[int] | Numbers, space: int) -> Numbers:
    """Put lengths into as few rows of ``space`` as best fit decreasing does; return the row of each.

    The longest comes first, into the row where it leaves the least space; of rows with equal space, into the one that
    got it last. Lengths that are equal are placed together: a row that is the best for one stays the best for the next
    until it has no space for another.

    >>> pack([3, 5, 4, 4], 8).tolist()
    [0, 0, 1, 1]
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    order = np.argsort((space - lengths).astype(np.min_scalar_type(space)), kind="stable")  # small types sort faster
    rows = np.empty(len(lengths), np.int64)
    with_space: list[list[Numbers]] = [[] for _ in range(space)]  # rows by the space they have left
    spaces, count, placed = 0, 0, 0  # bit s of spaces is set: a row has space s left
    for length, number in zip(*(values[::-1].tolist() for values in np.unique(lengths, return_counts=True))):
        waiting = number
        while waiting:
            fitting = spaces >> length
            left = length + (fitting & -fitting).bit_length() - 1 if fitting else space
            each = left // length
            needed = -(-waiting // each)
            if fitting:
                held = with_space[left].pop()
                taken = held[: -needed - 1 : -1]  # the last ones, from the end
                if len(taken) < len(held):
                    with_space[left].append(held[: -len(taken)])
                elif not with_space[left]:
                    spaces ^= 1 << left
            else:
                taken = np.arange(count, count + needed)
                count += needed
            now = min(waiting, len(taken) * each)
            rows[order[placed : placed + now]] = np.repeat(taken, each)[:now]
            placed, waiting = placed + now, waiting - now
            last = now - (len(taken) - 1) * each  # lengths in the last row, perhaps fewer than in the others
            for same, remaining in ((taken[:-1], left - each * length), (taken[-1:], left - last * length)):
                if len(same) and remaining:
                    with_space[remaining].append(same)
                    spaces |= 1 << remaining
    return rows
