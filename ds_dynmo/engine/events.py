"""Events between the parts of the engine: one place publishes an event, and every part that must know subscribes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from ds_dynmo.placement import Placement

T = TypeVar("T")


@dataclass(frozen=True)
class LayersMoved:
    """Layers have moved, or were replaced by other modules.

    Attributes:
        placement: where layers are from now on.
        step: ``global_steps`` then.
        stages_changed: by a re-packing: there are fewer or more stages than before, or other ranks hold them.
    """

    placement: Placement
    step: int
    stages_changed: bool = False


class EngineEvent(Generic[T]):
    """Calls its subscribers in the order in which they subscribed, on the rank where it is published."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[str, Callable[[T], None]]] = []

    def subscribe(self, why: str, call: Callable[[T], None]) -> None:
        """Call ``call`` whenever the event is published.

        Args:
            why: in one line, what would be wrong otherwise.
        """
        self._subscribers.append((why, call))

    def publish(self, what: T) -> None:
        for _, call in self._subscribers:
            call(what)

    @property
    def reasons(self) -> list[str]:
        """Why each subscriber must know, in order."""
        return [why for why, _ in self._subscribers]


class AroundSchedule:
    """The context managers that the schedule of a batch runs inside.

    Attributes:
        running: a schedule runs now, training or evaluation.
    """

    def __init__(self) -> None:
        self.running = False
        self._entered: list[Callable[[bool], AbstractContextManager[None]]] = []

    def add(self, enter: Callable[[bool], AbstractContextManager[None]]) -> None:
        """Enter ``enter(training)`` before a schedule runs; ``training`` is False in an evaluation."""
        self._entered.append(enter)

    @contextmanager
    def __call__(self, training: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(setattr, self, "running", False)
            self.running = True
            for enter in self._entered:
                stack.enter_context(enter(training))
            yield


class Timeline:
    """Lets the parts mark what they do while a batch is traced; costs nothing otherwise.

    Attributes:
        record: makes a context manager for a phase of a category and a name; None: nothing is traced.
    """

    def __init__(self) -> None:
        self.record: Callable[[str, str], AbstractContextManager[None]] | None = None

    def phase(self, category: str, name: str) -> AbstractContextManager[None]:
        """Mark a part of a batch, or of what follows it."""
        return nullcontext() if self.record is None else self.record(category, name)
