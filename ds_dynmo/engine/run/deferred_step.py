"""The optimizer's step of a batch at whose end layers change places."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ds_dynmo.engine.events import Timeline


class _Calls(NamedTuple):
    poll: Callable[[], object]
    before_step: Callable[[], None]
    after_step: Callable[[], None]


class DeferredStep:
    """Defers the optimizer's step of one batch until its schedule has ended, and lets other work run around it.

    What runs a batch (wrapped layers, compiled layers, hooks) holds the stage's layers. So layers change places once it
    has ended, and the step follows.
    """

    def __init__(self) -> None:
        self._calls: _Calls | None = None
        self._step: Callable[[], None] | None = None

    def defer(
        self, *, poll: Callable[[], object], before_step: Callable[[], None], after_step: Callable[[], None]
    ) -> None:
        """Defer the step of the next batch.

        Args:
            poll: called after each action of the batch.
            before_step, after_step: called once, by :meth:`run`.
        """
        self._calls = _Calls(poll, before_step, after_step)

    def cancel(self) -> None:
        """Run the next step in its schedule."""
        self._calls = self._step = None

    @property
    def is_deferred(self) -> bool:
        """Whether the step of the next batch, or of the one that trains, is deferred."""
        return self._calls is not None

    def keep(self, step: Callable[[], None]) -> bool:
        """Keep the optimizer's step for :meth:`run` if it is deferred; return whether it is."""
        self._step = step if self.is_deferred else None
        return self.is_deferred

    def poll(self) -> None:
        """Let other work proceed; call it after each action of a batch."""
        if self._calls is not None:
            self._calls.poll()

    def run(self, timeline: Timeline) -> None:
        """Run the deferred step, with the calls before and after it; do nothing if none is deferred.

        Args:
            timeline: shows both in a trace.
        """
        calls, step = self._calls, self._step
        self.cancel()
        if calls is None:
            return
        with timeline.phase("migrate", "change places"):
            calls.before_step()
        if step is not None:
            with timeline.phase("optimizer step", "optimizer step"):
                step()
        calls.after_step()
