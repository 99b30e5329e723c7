"""Walking over objects: what is found, by which path, and that the path leads to the counterpart on another rank."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from ds_dynmo.engine.move.object_graph import (
    children,
    copy_of_modules,
    follow,
    is_constant,
    is_immutable,
    text,
    walk,
)


class Thing:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Lazy(OrderedDict[str, Any]):
    """A registry that imports what is read from it: it must not be read."""

    def items(self) -> Any:
        raise AssertionError("it was asked")

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("it was asked")


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: list[int]


@pytest.mark.parametrize(
    "value", [None, 1, "a", torch.float32, torch.device("cpu"), nn.Linear, len, walk, logging.root]
)
def test_values_that_are_constants(value: Any) -> None:
    assert is_constant(value)


@pytest.mark.parametrize("value", [[], {}, torch.zeros(1), lambda x: x, functools.partial(len), Thing(), nn.ReLU()])
def test_values_that_are_not_constants(value: Any) -> None:
    assert not is_constant(value) and not is_immutable(value)


def test_frozen_values_may_hold_mutable_ones() -> None:
    frozen = Frozen([1])
    assert is_immutable(frozen) and is_immutable(([],))
    assert [child for _, child in children(frozen)] == [frozen.values]


def closure(value: Any) -> Any:
    return lambda: value


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda found: {"a": [0, found]}, "['a'][1]"),
        (lambda found: Thing(x=(1, found)), ".x[1]"),
        (lambda found: Slotted(found), ".inner"),
        (lambda found: functools.partial(print, 1, key=found), ".keywords['key']"),
        (closure, ".<variable 0>"),
        (lambda found: Thing(method=Thing(x=found).__init__), ".method.__self__.x"),  # type: ignore[misc]
        (lambda found: Lazy(a=found), "['a']"),
    ],
)
def test_a_path_leads_to_the_counterpart(make: Any, path: str) -> None:
    here, there = Thing(), Thing()
    found = {id(value): steps for steps, value in walk([((), make(here))], lambda _: True)}
    assert text(found[id(here)]) == path
    assert follow(make(there), found[id(here)]) is there


def test_submodules_parameters_and_buffers_are_found_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.note = [Thing()]  # type: ignore[assignment]
    paths = {text(path) for path, _ in walk([((), module)], lambda _: True)}
    assert {".0", ".0.weight", ".1.running_mean", ".note[0]"} <= paths
    assert not any("_parameters" in path or "_modules" in path for path in paths)


def test_a_path_without_a_counterpart_is_named() -> None:
    with pytest.raises(LookupError, match=r"\.gone is not there"):
        follow(Thing(), (("attribute", "gone"),))


def test_each_object_is_found_once_by_its_shortest_path() -> None:
    shared = Thing()
    found = [value for _, value in walk([((), {"far": {"away": shared}, "near": shared})], lambda _: True)]
    assert sum(value is shared for value in found) == 1
    paths = {id(value): path for path, value in walk([((), {"far": {"away": shared}, "near": shared})], lambda _: True)}
    assert text(paths[id(shared)]) == "['near']"


def test_a_copy_of_modules_refers_to_the_same_objects() -> None:
    layer = nn.Sequential(nn.Linear(2, 2))
    layer.shared, layer.parts = Thing(), [layer[0]]  # type: ignore[assignment]
    copied: Any = copy_of_modules(layer)
    assert copied.shared is layer.shared
    assert copied[0] is not layer[0] and copied.parts[0] is copied[0]
    assert copied[0].weight is not layer[0].weight and torch.equal(copied[0].weight, layer[0].weight)


def test_a_copy_of_a_graph_takes_nothing_from_the_original() -> None:
    graph = symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    copied = copy_of_modules(graph)
    assert graph.graph.owning_module is graph and copied.graph is not graph.graph
    assert torch.equal(copied(torch.ones(2)), graph(torch.ones(2)))
