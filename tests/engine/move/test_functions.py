"""Functions of the layer list: those that hold weights are refused, and moves of those that changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.move.functions import ListFunctions, check_functions, check_same
from ds_dynmo.errors import ConfigError


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(2, 2)), 2.0

    def attend(self, hidden: Any) -> Any:
        return hidden @ self.weight.t()

    def scaled(self, hidden: Any) -> Any:
        return hidden * self.scale


class Running:
    def __init__(self, mean: Any = None) -> None:
        self.mean, self.calls = mean, 0

    def __call__(self, hidden: Any) -> Any:
        self.mean = hidden if self.mean is None else self.mean + hidden
        self.calls += 1
        return hidden - self.mean


class Scale:
    def __init__(self) -> None:
        self.factor, self.unused = 2.0, torch.ones(3)

    def __call__(self, hidden: Any) -> Any:
        return hidden * self.factor


def halve(hidden: Any) -> Any:
    return hidden / 2


LAYER, CONSTANT, ACTIVATION = Projection(), torch.full((2,), 0.5), nn.GELU()
running = Running(torch.zeros(2))


def entries(function: Any) -> list[Any]:
    return [LayerSpec(nn.Linear, 2, 2), LAYER, function]


OF_LAYER_1 = r"layers\[2\] \(.*\) is no nn.Module and uses {}, which is {}layer 1: when layers move"
REFUSED: dict[str, tuple[Any, str]] = {
    "bound method": (LAYER.attend, OF_LAYER_1.format("self.weight", "weight of ")),
    "lambda": (lambda hidden: LAYER.attend(hidden), OF_LAYER_1.format("LAYER.attend: self.weight", "weight of ")),
    "partial": (functools.partial(Projection.attend, LAYER), OF_LAYER_1.format(".<argument 0>", "")),
    "module with weights": (functools.partial(Projection.attend, Projection()), r"Projection with weights"),
    "tensor that trains": (functools.partial(torch.add, torch.ones(2, requires_grad=True)), "tensor that trains"),
    "object": (Running(torch.zeros(2)), r"functions.Running\) .* self.mean, which is a torch.Tensor of the object"),
    "object of numpy": (Running(numpy.zeros(2)), r"self.mean, which is a numpy.ndarray of the object"),
    "around an object": (lambda hidden: running(hidden), r"running: self.mean, which is a torch.Tensor of the object"),
    "tied": (
        TiedLayerSpec("tie", Projection, forward_fn=lambda layer, hidden: LAYER.attend(layer(hidden))),
        OF_LAYER_1.format("LAYER.attend: self.weight", "weight of "),
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_functions_that_hold_weights_are_refused(how: str) -> None:
    function, message = REFUSED[how]
    with pytest.raises(ConfigError, match=message):
        check_functions(entries(function), nn.ModuleDict())


@pytest.mark.parametrize(
    "function",
    [
        halve,
        torch.relu,
        nn.functional.gelu,
        ACTIVATION.forward,
        lambda hidden: ACTIVATION(hidden) * CONSTANT,
        lambda hidden: hidden * LAYER.scale,
        LAYER.scaled,
        functools.partial(torch.mul, CONSTANT),
        functools.partial(nn.functional.dropout, p=0.1),
        Scale(),
        Running(),
        TiedLayerSpec("tie", Projection, forward_fn=Projection.attend),
    ],
)
def test_functions_without_weights_are_not_refused(function: Callable[..., Any]) -> None:
    check_functions(entries(function), nn.ModuleDict())


class Model(PipelineModule):
    """A PipelineModule that is not built: what functions read of one."""

    def __init__(self, *tied: str) -> None:
        nn.Module.__init__(self)
        self.tied_modules = nn.ModuleDict({key: Projection() for key in tied})


def tied_specs(model: Model) -> dict[str, TiedLayerSpec]:
    """Return uses of the key "tie" whose functions read tied modules of the PipelineModule."""
    functions = {
        "own": lambda layer, hidden: hidden @ model.tied_modules.tie.weight,
        "own by subscript": lambda layer, hidden: hidden @ model.tied_modules["tie"].weight,
        "another": lambda layer, hidden: hidden @ model.tied_modules.other.weight,
    }
    return {how: TiedLayerSpec("tie", Projection, forward_fn=function) for how, function in functions.items()}


@pytest.mark.parametrize("how", ["own", "own by subscript"])
@pytest.mark.parametrize("tied", [["tie"], []])
def test_a_function_may_read_its_own_tied_module(how: str, tied: list[str]) -> None:
    model = Model(*tied)
    specs = entries(tied_specs(model)[how])
    check_functions(specs, model.tied_modules)
    functions = ListFunctions(specs, model.tied_modules)
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    assert not functions.changes([0, 1, 2], pipeline=0)


@pytest.mark.parametrize(("how", "what"), [("another", "a tensor that trains"), ("own by subscript", "ModuleDict")])
def test_a_function_may_not_read_another_tied_module(how: str, what: str) -> None:
    model = Model("tie", "other")
    other = TiedLayerSpec("other", Projection)
    with pytest.raises(ConfigError, match=rf"layers\[2\] .* uses model.tied_modules.*{what}"):
        check_functions([*entries(tied_specs(model)[how]), other], model.tied_modules)


def changes_of(function: Any, *calls: Any) -> Any:
    functions = ListFunctions(entries(function), nn.ModuleDict())
    for value in calls:
        function(value)
    return functions.changes([0, 1, 2], pipeline=0)


@pytest.mark.parametrize("mean", [None, 1.0, torch.zeros(2)])
def test_a_function_that_changed_on_one_rank_is_refused(mean: Any) -> None:
    changed, same = changes_of(Running(mean), torch.ones(2)), changes_of(Running(mean))
    assert not same
    with pytest.raises(TypeError, match=r"layers\[2\] is no nn.Module and reads self\.(calls|mean), which changed"):
        check_same([{}, changed, same])
    with pytest.raises(TypeError, match=r"layers\[2\] is no nn.Module"):
        check_same([changed, changes_of(Running(mean), torch.ones(2), torch.ones(2))])
    check_same([changed, changes_of(Running(mean), torch.ones(2)), {}])
    check_same([{(1, 2): changed[0, 2]}, changed, changed, {(1, 2): changed[0, 2]}])  # of two replicas


def count() -> Callable[[Any], Any]:
    calls = 0

    def counting(hidden: Any) -> Any:
        nonlocal calls
        calls += 1
        return hidden * calls

    return counting


def collect() -> Callable[[Any], Any]:
    seen: list[Any] = []
    return lambda hidden: (seen.append(hidden), len(seen))[1]


def fill(large: bool) -> Callable[[Any], Any]:
    table = torch.zeros(5_000_000 if large else 2)
    return lambda hidden: table.add_(hidden)


@pytest.mark.parametrize("make", [count, collect, lambda: fill(False), lambda: fill(True)])
def test_state_in_closures_is_found(make: Callable[[], Any]) -> None:
    assert not changes_of(make())
    assert changes_of(make(), 1.0)
    check_same([changes_of(make(), 1.0), changes_of(make(), 1.0)])
