"""What a function reads is found without running it: what it could reach but does not read is not among that."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_dynmo.engine.move.code_reads import reads_of


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(2, 2)), 2.0

    def forward(self, hidden: Any) -> Any:
        return self.twice(hidden) @ self.weight

    def twice(self, hidden: Any) -> Any:
        return [hidden * self.scale for _ in range(2)]

    @property
    def dtype(self) -> Any:
        return self.weight.dtype


class Running:
    __slots__ = ("mean", "others")

    def __init__(self) -> None:
        self.mean, self.others = torch.zeros(2), [torch.ones(1)]

    def __call__(self, hidden: Any) -> Any:
        return hidden - self.centre

    @property
    def centre(self) -> Any:
        return self.mean

    @classmethod
    def constant(cls, hidden: Any) -> Any:
        return hidden * SCALE


class Trainer:
    def __init__(self) -> None:
        self.projection, self.scale, self.table = Projection(), 3.0, torch.ones(2)

    def scales(self) -> Callable[[Any], Any]:
        return lambda hidden: hidden * self.scale

    def projects(self) -> Callable[[Any], Any]:
        return lambda hidden: [self.projection(part) for part in hidden]

    def twice(self, hidden: Any) -> Any:
        return self.half(self.half(hidden))

    def half(self, hidden: Any) -> Any:
        return hidden + self.table


SCALE = 0.5
PROJECTION, RUNNING, TRAINER, BOX = Projection(), Running(), Trainer(), {"first": [Projection()], "scale": 4.0}
ACTIVATION = nn.GELU()


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


@functools.cache
def remembered(count: int) -> Any:
    return BOX["scale"], count


@decorated
def with_default(hidden: Any, *, factor: Any = PROJECTION.weight) -> Any:
    return hidden * factor


@torch.compile
def compiled(hidden: Any) -> Any:
    return PROJECTION.twice(hidden)


def helped(hidden: Any) -> Any:
    return with_default(hidden)


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "bound method": (PROJECTION.forward, ["self.twice: self.scale", "self.weight"]),
    "attribute of a module": (lambda hidden: hidden * PROJECTION.scale, ["PROJECTION.scale"]),
    "child of a module": (lambda hidden: TRAINER.projection.weight, ["TRAINER.projection.weight"]),
    "module that is called": (lambda hidden: PROJECTION(hidden), ["PROJECTION"]),
    "property of a module": (lambda hidden: hidden.to(PROJECTION.dtype), ["PROJECTION.dtype"]),
    "parameters of a module": (lambda hidden: list(PROJECTION.parameters()), ["PROJECTION.parameters"]),
    "stateless module": (lambda hidden: ACTIVATION(hidden), ["ACTIVATION"]),
    "object": (RUNNING, ["self.centre: self.mean"]),
    "object that is called": (lambda hidden: RUNNING(hidden), ["RUNNING: self.centre: self.mean"]),
    "class method": (RUNNING.constant, ["SCALE"]),
    "what of an object is read": (TRAINER.scales(), ["self.scale"]),
    "within a comprehension": (TRAINER.projects(), ["self.projection"]),
    "method of an object": (TRAINER.twice, ["self.half: self.table"]),
    "container": (lambda hidden: BOX, ["BOX['first'][0]", "BOX['scale']"]),
    "method of a container": (lambda hidden: BOX.values(), ["BOX['first'][0]", "BOX['scale']"]),
    "gradient": (lambda hidden: PROJECTION.weight.grad.mul_(2), ["PROJECTION.weight"]),
    "partial": (functools.partial(torch.mul, PROJECTION.weight, out=None), ["", ".<argument 0>", ".<argument out>"]),
    "partial of a function": (functools.partial(helped), ["with_default: function.<default>"]),
    "cache": (remembered, ["BOX['first'][0]", "BOX['scale']"]),
    "compiled": (compiled, ["PROJECTION.twice: self.scale"]),
    "function of torch": (nn.functional.gelu, [""]),
    "no constant": (lambda hidden: hidden.view(()), []),
    "constants": (lambda hidden: nn.functional.relu(hidden) * SCALE, ["SCALE"]),
}


@pytest.mark.parametrize("how", FUNCTIONS)
def test_reads(how: str) -> None:
    function, expected = FUNCTIONS[how]
    found = [read.path for read in reads_of(function) if not isinstance(read.value, type | types.ModuleType | str)]
    assert sorted(found) == sorted(expected)


def test_reads_of_an_object_are_those_of_its_own_methods() -> None:
    def of_owner(function: Callable[..., Any]) -> list[bool]:
        return [read.of_owner for read in reads_of(function) if isinstance(read.value, torch.Tensor)]

    table = TRAINER.table
    assert of_owner(RUNNING) == of_owner(TRAINER.half) == [True]
    assert of_owner(lambda hidden: hidden + table) == of_owner(PROJECTION.forward) == [False]


def test_functions_that_call_each_other_are_read_once() -> None:
    def even(count: int) -> Any:
        return SCALE if count == 0 else odd(count - 1)

    def odd(count: int) -> Any:
        return PROJECTION.weight if count == 0 else even(count - 1)

    assert {read.path for read in reads_of(even)} == {"SCALE", "odd: PROJECTION.weight"}


def test_large_containers_are_left_out() -> None:
    data = [torch.ones(1)] * 10_001
    assert [type(read.value) for read in reads_of(lambda hidden: data)] == [list]
