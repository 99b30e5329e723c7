"""Which function carries out each instruction, as DeepSpeed's engine looks it up (read in 0.19.8)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.pipe import engine as deepspeeds
from deepspeed.runtime.pipe import schedule

from ds_dynmo.errors import ConfigError

Instruction = Callable[..., None]
Instructions = Mapping[type, Instruction]

AT_THE_END = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)
_INSTEAD = (
    "call engine.before_step, hook the layers, or override train_batch in a subclass of PipelineEngine given as "
    "engine_class"
)


def is_deepspeeds(function: Any) -> bool:
    """Return whether it is a function of DeepSpeed's engine, by its code: ``wraps`` copies the name."""
    return getattr(function, "__globals__", None) is vars(deepspeeds)


def checked_instructions(engine: Any) -> Instructions:
    """Return the instructions of an engine or of a class: DeepSpeed's, and the user's at the end of a batch.

    Raises:
        ConfigError: another instruction is the user's; the first one is named.
    """
    instructions: Instructions = engine._INSTRUCTION_MAP
    for kind, instruction in instructions.items():
        if kind not in AT_THE_END and not is_deepspeeds(instruction):
            name = getattr(instruction, "__qualname__", repr(instruction))
            raise ConfigError(
                f"_INSTRUCTION_MAP[{kind.__name__}] = {instruction.__module__}.{name}: only the instructions at the "
                f"end of a batch may be yours, {', '.join(kind.__name__ for kind in AT_THE_END)}; {_INSTEAD}"
            )
    return instructions


def check_steps(steps: Any, *, training: bool) -> None:
    """Refuse the steps of a batch that are not of DeepSpeed's schedule, with no method replaced.

    Raises:
        ConfigError: naming their class.
    """
    kind = schedule.TrainSchedule if training else schedule.InferenceSchedule
    named = f"{type(steps).__module__}.{type(steps).__qualname__}"
    if type(steps) is kind:
        methods = {name: method for name, method in vars(kind).items() if inspect.isfunction(method)}
        replaced = [name for name, method in methods.items() if method.__globals__ is not vars(schedule)]
        if not replaced:
            return
        named = f"{named}.{replaced[0]} = {methods[replaced[0]].__module__}.{methods[replaced[0]].__qualname__}"
    raise ConfigError(
        f"{named}: batches run DeepSpeed's {kind.__name__} or a schedule of dynmo.schedule, none of yours; {_INSTEAD}"
    )
