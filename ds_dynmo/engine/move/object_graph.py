"""Walks over the objects that a Python object refers to, by steps that lead to their counterparts on another rank.

Immutable objects (numbers, strings, types, functions of a Python module, ...) are left out: copies of them are equal.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import logging
import pathlib
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import nn
from torch.fx import GraphModule

from ds_dynmo.torch_private import OpOverload, OpOverloadPacket

# ("attribute", name), ("item", key), ("cell", number of a closure's variable), ("member", number): see members(), or
# ("state", number): of the state that the class pickles
Step = tuple[str, Any]
Path = tuple[Step, ...]

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GenericAlias,
    type(Ellipsis),
    type(NotImplemented),
    range,
    slice,
    enum.Enum,
    re.Pattern,
    pathlib.PurePath,
    logging.Logger,
    numpy.dtype,
    numpy.generic,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.qscheme,
    torch.finfo,
    torch.iinfo,
    torch.Size,
    OpOverload,
    OpOverloadPacket,
)
_HELD_BY_NAME = ("_parameters", "_buffers", "_modules")  # an nn.Module's, private in torch; read in 2.13.0
MODULE_MACHINERY = frozenset(vars(nn.Module()))  # attributes that every module has


def is_constant(value: Any) -> bool:
    """Return whether ``value`` and all it holds are immutable, or it is pickled by name."""
    return _is_kind_of_constants(type(value)) or _is_importable(value)  # type: ignore[arg-type]  # types are hashable


@functools.cache  # of some forty types, asked for every object of a layer
def _is_kind_of_constants(kind: type) -> bool:
    return issubclass(kind, _CONSTANTS)


def is_immutable(value: Any) -> bool:
    """Return whether ``value`` itself is immutable, if not what it holds: a tuple, a frozen dataclass or model."""
    if isinstance(value, tuple | frozenset):
        return True
    if dataclasses.is_dataclass(value):
        return bool(getattr(type(value), "__dataclass_params__").frozen)  # noqa: B009  # which the stubs do not have
    settings = getattr(type(value), "model_config", None)
    return isinstance(settings, dict) and bool(settings.get("frozen"))


def children(value: Any) -> Iterator[tuple[Step, Any]]:
    """Yield the objects that ``value`` refers to directly, without constants, in the same order on every rank."""
    for step, child in all_children(value):
        if not is_constant(child):
            yield step, child


def members(value: Any) -> Iterator[tuple[Step, Any]]:
    """Yield objects of ``value`` that no step leads to on another rank: members of a set, keys of a dict."""
    held: Iterable[Any] = ()
    if isinstance(value, set | frozenset):
        held = list(value)
    elif isinstance(value, dict):
        held = list(dict.keys(value))
    yield from ((("member", number), item) for number, item in enumerate(held) if not is_constant(item))


def follow(start: Any, path: Sequence[Step]) -> Any:
    """Follow ``path`` from ``start``.

    Raises:
        LookupError: no object has this path here.
    """
    for kind, key in path:
        try:
            if kind == "attribute":
                start = getattr(start, key)
            elif kind == "item":
                start = dict.__getitem__(start, key) if isinstance(start, dict) else start[key]
            else:
                start = start.__closure__[key].cell_contents
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise LookupError(f"{_step_text((kind, key))} is not there") from error
    return start


def text(path: Sequence[Step]) -> str:
    """Write ``path`` as Python does: ``.attention.bias[0]``."""
    return "".join(map(_step_text, path))


def walk(
    roots: Sequence[tuple[Path, Any]],
    enter: Callable[[Any], bool],
    children: Callable[[Any], Iterable[tuple[Step, Any]]] = children,
) -> Iterator[tuple[Path, Any]]:
    """Visit every object that can be reached from ``roots``, each once, by one of the shortest paths.

    Args:
        enter: returns whether to continue from an object (which is yielded in any case).
        children: yields the objects that an object refers to.
    """
    waiting = [(path, value) for path, value in roots if not is_constant(value)]
    met: dict[int, Any] = {}
    for path, value in waiting:  # grows during the loop
        if id(value) in met:
            continue
        met[id(value)] = value
        yield path, value
        if enter(value):
            waiting += [((*path, step), child) for step, child in children(value)]


def copy_of_modules(layer: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a layer's modules and tensors; the copy shares all other objects with the layer.

    Args:
        memo: of ``copy.deepcopy``: by ``id`` of a tensor or module, what replaces it.
    """
    own = {id(part) for part in (*layer.modules(), *layer.parameters(), *layer.buffers())}

    def lists_own(value: Any) -> bool:
        found = walk([((), value)], lambda container: isinstance(container, list | tuple | dict))
        return any(id(part) in own for _, part in found)

    # A GraphModule copies its graph: one that two share would belong to the copy.
    held = [item for part in layer.modules() if not isinstance(part, GraphModule) for item in vars(part).items()]
    others = {id(value): value for name, value in held if name not in MODULE_MACHINERY and not lists_own(value)}
    return copy.deepcopy(layer, {**others, **(memo or {})})


def place_in_class(method: types.MethodType) -> tuple[type, str] | None:
    """Find the class of the method's owner with this function, and the name there; None: no class has it.

    The name may differ from the function's ``__name__``: for a private method, or one that a decorator made.
    """
    for kind in type(method.__self__).__mro__:
        for name, value in vars(kind).items():
            if value is method.__func__:
                return kind, name
    return None


def _is_importable(value: Any) -> bool:
    """Return whether ``value`` is a function or class that its Python module has under the same name."""
    if not callable(value) or isinstance(value, nn.Module | types.MethodType | functools.partial):
        return False
    try:
        found = sys.modules[value.__module__]
        for name in value.__qualname__.split("."):
            found = getattr(found, name)
    except (AttributeError, KeyError, TypeError):
        return False
    return found is value


def all_children(value: Any) -> Iterator[tuple[Step, Any]]:
    """Yield the objects that ``value`` refers to directly, constants too."""
    if isinstance(value, torch.Tensor | torch.jit.ScriptFunction):
        return
    if isinstance(value, nn.Module):
        yield from _of_module(value)
        return
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
        return
    if isinstance(value, types.MethodType):
        yield ("attribute", "__self__"), value.__self__
        if place_in_class(value) is None:
            yield ("attribute", "__func__"), value.__func__
        return
    if isinstance(value, functools.partial):
        yield from ((("attribute", name), getattr(value, name)) for name in ("func", "args", "keywords"))
        return
    if isinstance(value, dict):  # by dict's methods: some subclasses import what they are asked for
        yield from ((("item", key), item) for key, item in list(dict.items(value)) if is_constant(key))
    elif isinstance(value, list):
        yield from ((("item", number), item) for number, item in enumerate(list.__iter__(value)))
    elif isinstance(value, deque):
        yield from ((("item", number), item) for number, item in enumerate(deque.__iter__(value)))
    elif isinstance(value, tuple):
        yield from ((("item", number), item) for number, item in enumerate(tuple.__iter__(value)))
    yield from ((("attribute", name), item) for name, item in _attributes(value))


def _of_module(module: nn.Module) -> Iterator[tuple[Step, Any]]:
    attributes = vars(module)
    for held in _HELD_BY_NAME:
        yield from ((("attribute", name), child) for name, child in attributes.get(held, {}).items())
    for name, child in attributes.items():
        if name not in MODULE_MACHINERY or (name not in _HELD_BY_NAME and isinstance(child, dict) and child):
            yield ("attribute", name), child


def _of_function(function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
    for number, cell in enumerate(function.__closure__ or ()):
        try:
            yield ("cell", number), cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield ("attribute", "__defaults__"), function.__defaults__
    yield ("attribute", "__kwdefaults__"), function.__kwdefaults__


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for name, slot in vars(kind).items():  # the name of a private slot begins with that of its class
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield name, slot.__get__(value)
                except AttributeError:  # not assigned yet
                    continue


def _step_text(step: Step) -> str:
    kind, key = step
    known = {"attribute": f".{key}", "item": f"[{key!r}]", "member": f".<member {key}>", "state": f".<state {key}>"}
    return known.get(kind, f".<variable {key}>")
