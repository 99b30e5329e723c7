"""The point between a batch's backward passes and the optimizer's step, at which layers may change places."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.runtime.pipe import schedule

from ds_dynmo.engine.deepspeed.instruction_map import Instruction, Instructions
from ds_dynmo.engine.events import Timeline


class StepGate:
    """Lets other work run while a batch trains, and before its optimizer's step.

    The step then runs after the schedule, out of the contexts around it, because these hold the stage's layers.
    """

    def __init__(self) -> None:
        self._poll: Callable[[], object] | None = None
        self._before_step: Callable[[], None] | None = None
        self._step: Callable[[], None] | None = None

    def open_for(self, poll: Callable[[], object], before_step: Callable[[], None]) -> None:
        """Call ``poll`` after each instruction of the next batch, and ``before_step`` once before its step."""
        self._poll, self._before_step = poll, before_step

    def close(self) -> None:
        """Drop what :meth:`open_for` was given."""
        self._poll = self._before_step = self._step = None

    @property
    def is_open(self) -> bool:
        """Whether the next batch, or the one that trains, calls what :meth:`open_for` was given."""
        return self._before_step is not None

    def around_step(self, step: Instruction) -> Instruction:
        """Return the instruction of the optimizer's step, which waits for :meth:`pass_through` if the gate is open."""

        def optimizer_step(engine: Any, *args: Any, **kwargs: Any) -> None:
            if self.is_open:
                self._step = partial(step, engine, *args, **kwargs)
            else:
                step(engine, *args, **kwargs)

        return optimizer_step

    def polled(self, instructions: Instructions) -> Instructions:
        """Return ``instructions`` with a poll after each, if the gate is open."""
        poll = self._poll
        if poll is None:
            return instructions

        def followed(instruction: Instruction) -> Instruction:
            def run(engine: Any, *args: Any, **kwargs: Any) -> None:
                instruction(engine, *args, **kwargs)
                poll()

            return run

        return {
            kind: instruction if kind is schedule.OptimizerStep else followed(instruction)
            for kind, instruction in instructions.items()
        }

    def pass_through(self, timeline: Timeline) -> None:
        """Run what has to come before the step that waits, and the step; do nothing if the gate is closed.

        Args:
            timeline: shows both in a trace.
        """
        before, step = self._before_step, self._step
        self.close()
        if before is not None:
            with timeline.phase("migrate", "change places"):
                before()
        if step is not None:
            with timeline.phase("optimizer step", "optimizer step"):
                step()
