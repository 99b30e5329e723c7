"""Values and failures in the form that ranks exchange, and a comparison of texts by one sum over the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_dynmo.engine.comm.coordinates import GroupPlace
from ds_dynmo.engine.comm.objects import to_bytes
from ds_dynmo.engine.comm.same_facts import ranks_by
from ds_dynmo.errors import MigrationError, PartitionError

_EXPECTED = (PartitionError, MigrationError)  # training can continue after them


@dataclass(frozen=True)
class EncodedValue:
    """A pickled value for other ranks, or the reason why it cannot be sent."""

    data: bytes
    problem: str = ""

    @classmethod
    def of(cls, value: Any) -> EncodedValue:
        """Pickle a value."""
        try:
            return cls(to_bytes(value))
        except Exception as error:  # any error of a user's object; other ranks have to know
            return cls(b"", repr(error))


@dataclass(frozen=True)
class Failure:
    """An exception in the form that is sent to other ranks."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception, refusal: type[Exception] | None = None) -> Failure:
        """Describe an exception, with its notes (``add_note``).

        Args:
            refusal: a type of exception that is expected too.
        """
        kinds = _EXPECTED if refusal is None else (*_EXPECTED, refusal)
        expected = (kind.__name__ for kind in kinds if isinstance(error, kind))
        text = " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])
        return cls(next(expected, type(error).__name__), text)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    @property
    def is_expected(self) -> bool:
        """Whether training can continue after it."""
        return any(kind.__name__ == self.kind for kind in _EXPECTED)

    def error(self, message: str) -> Exception:
        """Build the error that this rank raises for it."""
        if self.kind == PartitionError.__name__:
            return PartitionError(message)
        return MigrationError(message, harmless=True)


def share_of_difference(place: GroupPlace, text: str) -> int:
    """Return a number of 64 bits. If the numbers of all ranks sum to 0, each group's ranks have the same text.

    A rank adds a hash of its text for the pair that it forms with the next rank of its group, and subtracts one for the
    pair with the rank before. Where the two texts of a pair are the same, the two hashes cancel out; where they are
    not, the sum is as random as a hash is, whatever other pairs add.
    """
    share = 0
    if place.index + 1 < place.size:
        share += _hash_in_pair(place.group, place.index, text)
    if place.index > 0:
        share -= _hash_in_pair(place.group, place.index - 1, text)
    return (share + (1 << 63)) % (1 << 64) - (1 << 63)


def _hash_in_pair(group: int, first: int, text: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{group} {first} {text}".encode()).digest()[:8], "big")


def differing_texts(entries: Sequence[tuple[int, str]]) -> str:
    """Describe which ranks have which text, in groups where texts differ.

    Args:
        entries: by rank, the number of the group and the text.
    """
    texts_of: dict[int, set[str]] = {}
    for number, theirs in entries:
        texts_of.setdefault(number, set()).add(theirs)
    ranks_of = ranks_by([theirs if len(texts_of[number]) > 1 else "" for number, theirs in entries])
    return ", ".join(f"{theirs} on ranks {ranks}" for theirs, ranks in ranks_of.items() if theirs)
