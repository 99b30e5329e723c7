"""What parts of the engine tell each other: one place publishes an event, whoever has to know subscribes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from ds_dynmo.placement import Placement

T = TypeVar("T")


@dataclass(frozen=True)
class LayersMoved:
    """The layers of this stage are others than before, or other modules.

    Attributes:
        placement: where layers are from now on.
        step: after how many batches.
        stages_changed: a re-packing: there are fewer or more stages than before, or other ranks hold them.
    """

    placement: Placement
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


class AroundSchedule:
    """What the schedule of a batch runs inside."""

    def __init__(self) -> None:
        self._entered: list[Callable[[bool], AbstractContextManager[None]]] = []

    def add(self, enter: Callable[[bool], AbstractContextManager[None]]) -> None:
        """Enter ``enter(training)`` before a schedule is run; ``training`` is False in an evaluation."""
        self._entered.append(enter)

    @contextmanager
    def __call__(self, training: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for enter in self._entered:
                stack.enter_context(enter(training))
            yield


class Timeline:
    """Lets the parts mark what they do, for whoever records a batch at the time; costs nothing if nobody does.

    Attributes:
        record: gives a context manager for a phase of this category and name; None: nobody records.
    """

    def __init__(self) -> None:
        self.record: Callable[[str, str], AbstractContextManager[None]] | None = None

    def phase(self, category: str, name: str) -> AbstractContextManager[None]:
        """A part of a batch, or of what follows it."""
        return nullcontext() if self.record is None else self.record(category, name)
