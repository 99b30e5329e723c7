"""A watch for parts that are tested without ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ds_dynmo.errors import RankLostError


class ToldWatch:
    """It knows of a lost rank once it is told.

    Attributes:
        verdict: of the lost rank; "": none is.
        waits: the waits that have begun.
        explained: the errors that it was asked about.
    """

    def __init__(self) -> None:
        self.verdict, self.waits = "", 0
        self.explained: list[Exception] = []

    @contextmanager
    def waiting(self, *, aside: bool = False) -> Iterator[None]:
        self.waits += 1
        yield

    def ending(self) -> AbstractContextManager[None]:
        return self.waiting()

    def check(self) -> None:
        if self.verdict:
            raise RankLostError(self.verdict)

    def explain(self, error: Exception) -> None:
        self.explained.append(error)
