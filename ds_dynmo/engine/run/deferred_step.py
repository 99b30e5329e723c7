"""The optimizer's step of a batch at whose end layers change places."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from deepspeed.runtime.pipe import schedule

from ds_dynmo.engine.deepspeed.instruction_map import Instruction, Instructions
from ds_dynmo.engine.events import Timeline


class _Calls(NamedTuple):
    poll: Callable[[], object]
    before_step: Callable[[], None]
    after_step: Callable[[], None]


class DeferredStep:
    """Defers the optimizer's step of one batch until its schedule has ended, and lets other work run around it.

    The context managers around a schedule (layer wrappers, instructions, compiled layers) hold the stage's layers. So
    layers change places after these have ended, and the step follows.
    """

    def __init__(self) -> None:
        self._calls: _Calls | None = None
        self._step: Callable[[], None] | None = None

    def defer(
        self, *, poll: Callable[[], object], before_step: Callable[[], None], after_step: Callable[[], None]
    ) -> None:
        """Defer the step of the next batch.

        Args:
            poll: called after each instruction of the batch.
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

    def around_step(self, step: Instruction) -> Instruction:
        """Wrap the instruction of the optimizer's step: it is kept for :meth:`run` if it is deferred."""

        def optimizer_step(engine: Any, *args: Any, **kwargs: Any) -> None:
            if self.is_deferred:
                self._step = partial(step, engine, *args, **kwargs)
            else:
                step(engine, *args, **kwargs)

        return optimizer_step

    def polled(self, instructions: Instructions) -> Instructions:
        """Return ``instructions``, each followed by a poll if the step is deferred."""
        if self._calls is None:
            return instructions
        poll = self._calls.poll

        def followed(instruction: Instruction) -> Instruction:
            def run(engine: Any, *args: Any, **kwargs: Any) -> None:
                instruction(engine, *args, **kwargs)
                poll()

            return run

        return MappingProxyType(
            {
                kind: instruction if kind is schedule.OptimizerStep else followed(instruction)
                for kind, instruction in instructions.items()
            }
        )

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
