"""How many slices a vocabulary is divided into, and their rows. Imports no torch, as configurations do not."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from pydantic import Field

__all__ = ["Slices", "num_slices", "rows_of_slices"]

Slices = (
    Annotated[int, Field(ge=1)] | Literal["auto"] | None
)  # None: one layer each for embedding and head, which returns logits


def num_slices(slices: Slices, vocabulary: int, *, head: float, block: float) -> int:
    """Return how many slices ``vocabulary_slices`` asks for; 0: the vocabulary is whole.

    Args:
        slices: a number; None: whole; "auto": so many that a slice is at most half a block, and whole if the head is
            smaller than a block.
        head, block: multiplications per token in the head and in a block.

    >>> [num_slices("auto", 256, head=head, block=2.0) for head in (1.9, 2.0, 6.5)]
    [0, 2, 7]
    """
    if slices == "auto":
        return 0 if head < block else min(ceil(2 * head / block), vocabulary)
    return slices or 0


def rows_of_slices(vocabulary: int, slices: int) -> list[range]:
    """Divide the rows of a vocabulary's matrix.

    >>> rows_of_slices(10, 3)
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    return [range(vocabulary * k // slices, vocabulary * (k + 1) // slices) for k in range(slices)]
