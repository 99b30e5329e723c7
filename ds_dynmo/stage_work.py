"""Work of a layer for all layers of its stage, which must not count as the layer's seconds.

It is arbitrary which layer does this work, and the work stays on the stage when that layer moves. If it counted as the
layer's, decisions would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Stopwatch(Protocol):
    """Measures the seconds of layers."""

    def pause(self) -> None:
        """Stop counting time for the current layer."""

    def resume(self) -> None:
        """Count time as before the last :meth:`pause` again: pauses may be nested."""


_stopwatch: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)  # of this thread


@contextmanager
def measured_by(stopwatch: Stopwatch) -> Iterator[None]:
    """Use ``stopwatch`` inside, and pause it during this thread's work for the stage."""
    token = _stopwatch.set(stopwatch)
    try:
        yield
    finally:
        _stopwatch.reset(token)


@contextmanager
def work_of_the_stage() -> Iterator[None]:
    """Mark the code inside as work for all layers of the stage."""
    stopwatch = _stopwatch.get()
    if stopwatch is None:
        yield
        return
    stopwatch.pause()
    try:
        yield
    finally:
        stopwatch.resume()
