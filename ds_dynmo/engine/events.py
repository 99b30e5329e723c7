"""What parts of the engine tell each other: one place publishes an event, whoever has to know subscribes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class LayersMoved:
    """The layers of this stage are others than before, or other modules.

    Attributes:
        partition: the boundaries in force from now on.
        step: after how many batches.
        stages_changed: a re-packing: there are fewer or more stages than before, or other ranks hold them.
    """

    partition: tuple[int, ...]
    step: int
    stages_changed: bool = False


class Event(Generic[T]):
    """Subscribers are called in the order in which they subscribed, on the rank where it is published."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[str, Callable[[T], None]]] = []

    def subscribe(self, why: str, call: Callable[[T], None]) -> None:
        """Call ``call`` whenever the event is published.

        Args:
            why: one line: what would be wrong if nobody did.
        """
        self._subscribers.append((why, call))

    def publish(self, what: T) -> None:
        for _, call in self._subscribers:
            call(what)

    @property
    def reasons(self) -> list[str]:
        """Why each subscriber has to know, in order."""
        return [why for why, _ in self._subscribers]
