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
_SCHEDULES = ("TrainSchedule", "InferenceSchedule")
_INSTEAD = (
    'remove the patch; the "dynmo" section chooses the order of passes, as by "schedule": {"kind": "zero_bubble"}; for '
    "other work call engine.before_step, hook layers, or override train_batch in a subclass of PipelineEngine given "
    "as engine_class"
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
            raise ConfigError(
                f"_INSTRUCTION_MAP[{kind.__name__}] = {_full_name(instruction)}: only the instructions at the end of a "
                f"batch may be yours, {', '.join(kind.__name__ for kind in AT_THE_END)}; {_INSTEAD}"
            )
    return instructions


def check_schedules() -> None:
    """Refuse a schedule class of DeepSpeed's that was replaced, or of which a method was.

    Raises:
        ConfigError: naming what took its place.
    """
    for kind in _SCHEDULES:
        present, place = getattr(schedule, kind), f"{schedule.__name__}.{kind}"
        if present.__module__ != schedule.__name__:
            raise _not_deepspeeds(f"{place} = {_full_name(present)}", kind)
        for owner in present.__mro__:
            methods = {name: method for name, method in vars(owner).items() if inspect.isfunction(method)}
            for name, method in methods.items():
                if method.__globals__ is not vars(schedule):
                    raise _not_deepspeeds(f"{place}.{name} = {_full_name(method)}", kind)


def check_steps(steps: Any, *, training: bool) -> None:
    """Refuse the steps of a batch that are not of DeepSpeed's schedule, with no method replaced.

    Raises:
        ConfigError: naming their class.
    """
    check_schedules()
    kind = _SCHEDULES[0 if training else 1]
    if type(steps) is not getattr(schedule, kind):
        raise _not_deepspeeds(_full_name(type(steps)), kind)


def _full_name(of: Any) -> str:
    return f"{of.__module__}.{getattr(of, '__qualname__', repr(of))}"


def _not_deepspeeds(named: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{named}: batches run DeepSpeed's {kind} or a schedule of dynmo.schedule, none of yours; {_INSTEAD}"
    )
