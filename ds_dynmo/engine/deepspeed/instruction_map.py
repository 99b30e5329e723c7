"""Which function carries out each instruction, as DeepSpeed's engine looks it up (read in 0.19.8)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.pipe import schedule

from ds_dynmo.errors import ConfigError

Instruction = Callable[..., None]
Instructions = Mapping[type, Instruction]


def present_instructions(engine: Any) -> Instructions:
    """Return the instructions that were set on the engine, or those of its class, DeepSpeed's or the user's."""
    instructions: Instructions = engine._INSTRUCTION_MAP
    return instructions


def entry(kind: type, instruction: Any) -> str:
    """Write an entry of the map as users do."""
    name = getattr(instruction, "__qualname__", repr(instruction))
    return f"_INSTRUCTION_MAP[{kind.__name__}] = {instruction.__module__}.{name}"


def is_deepspeeds_1f1b(steps: Any) -> bool:
    """Return whether a batch runs the steps of DeepSpeed's 1F1B, with no method replaced."""
    methods = [method for method in vars(type(steps)).values() if inspect.isfunction(method)]
    return type(steps) is schedule.TrainSchedule and all(m.__globals__ is vars(schedule) for m in methods)


@contextmanager
def instructions_in_force(engine: Any, instructions: Instructions) -> Iterator[None]:
    """Run schedules by ``instructions`` within the context; the engine's instructions are restored afterwards.

    Raises:
        ConfigError: afterwards, where others were set on the engine meanwhile.
    """
    on_engine = vars(engine).get("_INSTRUCTION_MAP")
    engine._INSTRUCTION_MAP = instructions
    try:
        yield
    finally:
        replaced = engine._INSTRUCTION_MAP is not instructions
        if on_engine is None:
            del engine._INSTRUCTION_MAP
        else:
            engine._INSTRUCTION_MAP = on_engine
    if replaced:
        raise ConfigError("_INSTRUCTION_MAP was set on the engine while a batch ran: set it between two batches")
