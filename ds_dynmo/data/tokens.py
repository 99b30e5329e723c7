"""Token ids of a text, and the check of all of them before training begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_dynmo.data.order import Numbers
from ds_dynmo.errors import ConfigError

__all__ = ["Ids", "Say", "Tokens", "check_ids", "say_nothing", "sometimes"]

Ids = Sequence[int] | Numbers  # of one document
Say = Callable[[str], None]

CHUNK = 2**24  # tokens that are looked at together
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


def say_nothing(line: str) -> None:
    """Drop the line: another rank says it."""


def sometimes(say: Say) -> Say:
    """Pass on a line when none was passed on for some seconds; the first ones of a quick task are dropped."""
    last = time.monotonic()

    def pass_on(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_PER_LINE:
            last = time.monotonic()
            say(line)

    return pass_on


def check_ids(tokens: Tokens, vocabulary: int, say: Say = say_nothing) -> Tokens:
    """Check every id, and find the documents where ``end_of_document`` ends them.

    Args:
        vocabulary: ids have to be below it.
        say: is told how far the check is, every few seconds.

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
    progress, found = sometimes(say), []
    for first in range(0, len(ids), CHUNK):
        chunk = ids[first : first + CHUNK]
        if int(chunk.max()) >= vocabulary or int(chunk.min()) < 0:
            place = int(np.flatnonzero((chunk >= vocabulary) | (chunk < 0))[0])
            raise ConfigError(
                f"{tokens.name}: token {first + place} of {len(ids)} is {int(chunk[place])}: the model's vocabulary "
                f"has {vocabulary} entries, 0 to {vocabulary - 1}"
            )
        if tokens.starts is None and end is not None:
            found.append(first + 1 + np.flatnonzero(chunk == end))
        done = first + len(chunk)
        progress(f"{tokens.name}: checked {done:,} of {len(ids):,} tokens ({done / len(ids):.0%})")
    if not found:
        return tokens
    ends = np.concatenate(found)
    starts = np.unique(np.concatenate(([0], ends, [len(ids)]))).astype(np.int64)
    return replace(tokens, starts=starts)
