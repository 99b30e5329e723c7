"""Events between the components of the engine: one publishes an event, those that must know subscribe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from ds_dynmo.placement import Placement

T = TypeVar("T")


@dataclass(frozen=True)
class LayersMoved:
    """Layers have moved, or were replaced by other modules.

    Attributes:
        placement: the new placement.
        step: ``global_steps`` at the move.
        stages_changed: whether a re-packing changed the number of stages or their ranks.
    """

    placement: Placement
    step: int
    stages_changed: bool = False


class EngineEvent(Generic[T]):
    """An event of this rank, which calls its subscribers in the order of subscription."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[str, Callable[[T], None]]] = []

    def subscribe(self, why: str, call: Callable[[T], None]) -> None:
        """Call ``call`` whenever the event is published.

        ``call`` may be collective only where every rank publishes the event, as after a re-packing
        (``stages_changed``). Subscribers do not depend on each other.

        Args:
            why: what would be wrong otherwise, in one line.
        """
        self._subscribers.append((why, call))

    def publish(self, what: T) -> None:
        """Call all subscribers, in the order of subscription."""
        for _, call in self._subscribers:
            call(what)

    @property
    def reasons(self) -> list[str]:
        """The reasons of the subscribers, in order."""
        return [why for why, _ in self._subscribers]


class Timeline:
    """Marks of the engine's phases: for other ranks, and while a batch is traced.

    Args:
        doing: tells other ranks what this one does meanwhile; None: nobody is told.

    Attributes:
        record: returns a context manager for a phase of a category and a name; None: no trace.
    """

    def __init__(self, doing: Callable[[str], AbstractContextManager[None]] | None = None) -> None:
        self._doing = doing or (lambda _: nullcontext())
        self.record: Callable[[str, str], AbstractContextManager[None]] | None = None

    @contextmanager
    def phase(self, category: str, name: str) -> Iterator[None]:
        """Mark a phase of a batch, or after it."""
        with self._doing(name), nullcontext() if self.record is None else self.record(category, name):
            yield
