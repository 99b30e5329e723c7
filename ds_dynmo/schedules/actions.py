"""An action of a pipeline schedule: one pass of one micro-batch through one chunk of layers."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Action", "Kind", "all_passes"]


_LETTERS = "FIWB"


class Kind(IntEnum):
    """What a pass calculates.

    A backward pass is one :attr:`BACKWARD`, or an :attr:`INPUT_GRADIENT` and later a :attr:`WEIGHT_GRADIENT` (Qi et
    al. 2024, section 2). Only the first of the two keeps another stage waiting.
    """

    FORWARD = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2
    BACKWARD = 3

    @property
    def letter(self) -> str:
        """F, I, W or B, as in ``torch.distributed.pipelining``."""
        return _LETTERS[self]

    @classmethod
    def of_letter(cls, letter: str) -> Kind:
        """Return the kind of a :attr:`letter`.

        Raises:
            ValueError: it is none of them.
        """
        return cls(_LETTERS.index(letter or "?"))


class Action(NamedTuple):
    """One pass of one micro-batch through one chunk.

    >>> str(Action(Kind.INPUT_GRADIENT, chunk=2, micro_batch=5))
    'I5 of chunk 2'
    """

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.letter}{self.micro_batch} of chunk {self.chunk}"

    @classmethod
    def of_text(cls, text: str, chunk: int) -> Action:
        """Read ``F5@2``: micro-batch 5, chunk 2; or ``F5``: of ``chunk``.

        Raises:
            ValueError: it is neither.
        """
        name, _, other = text.partition("@")
        return cls(Kind.of_letter(name[:1]), int(other or chunk), int(name[1:]))


@lru_cache(maxsize=16)
def all_passes(kind: Kind, num_chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return every pass of a kind, by chunk and micro-batch. Cached: a search builds many orders from them."""
    return tuple(
        tuple(Action(kind, chunk, micro_batch) for micro_batch in range(micro_batches)) for chunk in range(num_chunks)
    )
