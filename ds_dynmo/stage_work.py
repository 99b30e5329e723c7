"""Work that a layer does for all layers of its stage: it counts as no layer's seconds.

Which layer does it is chance, and it stays with the stage when that layer moves. So a partition that took it for the
layer's own work would be a wrong one.
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
        """Count time for the current layer again."""


_stopwatch: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)  # of this thread


@contextmanager
def measured_by(stopwatch: Stopwatch) -> Iterator[None]:
    """Pause ``stopwatch`` in the meantime where this thread works for the stage."""
    token = _stopwatch.set(stopwatch)
    try:
        yield
    finally:
        _stopwatch.reset(token)


@contextmanager
def work_of_the_stage() -> Iterator[None]:
    """Work for all layers of the stage inside."""
    stopwatch = _stopwatch.get()
    if stopwatch is None:
        yield
        return
    stopwatch.pause()
    try:
        yield
    finally:
        stopwatch.resume()
