"""Engines with a user's own class or instructions; every function runs on a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import deepspeed
from deepspeed.runtime.pipe.engine import PipelineEngine

import ds_dynmo
from ds_dynmo.errors import ConfigError
from tests.support.configs import Case, config
from tests.support.models import module_of

MOVES = ([0, 1, 8], [0, 7, 8], [0, 2, 8], [0, 5, 8])
STEPS = 5


def outcomes(results: list[dict[str, Any]], *names: str) -> list[list[Any]]:
    return [[result[name] for name in names] for result in results]


Counts = Counter[str]


def initialize(which: str, case: Case, make_layers: Callable[[Case], list[Any]], engine_class: Any = None) -> Any:
    module = module_of(case, make_layers)
    arguments: dict[str, Any] = {"model": module, "model_parameters": list(module.parameters()), "config": config(case)}
    if which == "deepspeed":
        arguments["config"].pop("dynmo", None)  # which DeepSpeed's engine does not read
        stock, deepspeed.PipelineEngine = deepspeed.PipelineEngine, engine_class or PipelineEngine
        try:
            return deepspeed.initialize(**arguments)[0]
        finally:
            deepspeed.PipelineEngine = stock
    return ds_dynmo.initialize(**arguments, **({"engine_class": engine_class} if engine_class else {}))[0]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")
