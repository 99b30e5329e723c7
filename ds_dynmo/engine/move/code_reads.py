"""What the code of a function reads, found without running it: of its closure, of global variables, of its owner.

:mod:`ds_dynmo.engine.move.object_graph` walks over what an object holds. Code also refers to objects by the names of
global variables, and uses only some of what it can reach. So an attribute of a variable is read (``settings.scale``),
not all that the variable holds. What a function calls is followed, unless it is of another installed package.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_dynmo.engine.move.names import MOST_ENTRIES, is_of_library
from ds_dynmo.engine.move.object_graph import is_constant
from ds_dynmo.torch_private import buffers_of, children_of, parameters_of

_Attributes = tuple[str, ...]
_OF_RANK = (PipelineModule, DeepSpeedEngine)  # they lead to the layers that are on the rank
_CONTAINERS = (list, tuple, set, frozenset, deque)
_NOTHING = object()


class Read(NamedTuple):
    """An object that code reads, as it is now.

    Attributes:
        path: as the code writes it.
        of_owner: whether an object other than a module holds it, whose method the code is.
    """

    path: str
    value: Any
    of_owner: bool = False


def reads_of(function: Callable[..., Any], path: str = "") -> Iterator[Read]:
    """Find the tensors, modules, constants and other objects that a function reads, and what it calls.

    Containers are yielded by what they hold; those of many entries are left out.
    """
    start = function.forward if isinstance(function, nn.Module) else function
    waiting, met = [Read(path, start)], {}
    for read in waiting:  # grows during the loop
        value = read.value
        key = (id(value.__func__), id(value.__self__)) if isinstance(value, types.MethodType) else (id(value), 0)
        if key in met or isinstance(value, _OF_RANK):
            continue
        met[key] = value  # keeps it alive, so that its id is not reused
        parts = _parts(read) if len(met) < MOST_ENTRIES else None
        if parts is None:
            yield read
        else:
            waiting += parts


def _parts(read: Read) -> Sequence[Read] | None:
    """Return what an object that code reads stands for; None: itself."""
    path, value, of_owner = read
    if isinstance(value, types.FunctionType):
        return [*_of_function(path, value, None)]
    if isinstance(value, types.MethodType):
        if isinstance(value.__func__, types.FunctionType) and not _is_of_library(value.__func__):
            return [*_of_function(path, value.__func__, value.__self__)]
        return [Read(path, value.__self__, of_owner)]
    if isinstance(value, functools.partial):
        arguments = [*enumerate(value.args), *value.keywords.items()]
        held = [(f"{path}.<argument {name}>", argument) for name, argument in arguments]
        return [Read(name, part, of_owner) for name, part in ((path, value.func), *held)]
    if isinstance(value, dict) and len(value) <= MOST_ENTRIES:
        return [Read(f"{path}[{key!r}]", item, of_owner) for key, item in list(dict.items(value))]
    if isinstance(value, _CONTAINERS) and len(value) <= MOST_ENTRIES:
        return [Read(f"{path}[{place}]", item, of_owner) for place, item in enumerate(list(value))]
    if isinstance(value, nn.Module | torch.Tensor):
        return None
    if "__wrapped__" in getattr(value, "__dict__", {}):  # as functools.lru_cache leaves it
        return [Read(path, value.__wrapped__, of_owner)]
    if is_constant(value):
        return None
    call = inspect.getattr_static(type(value), "__call__", None)
    if isinstance(call, types.FunctionType) and not _is_of_library(call):
        return [*_of_function(path, call, value)]
    return None


def _of_function(path: str, function: types.FunctionType, owner: Any) -> Iterator[Read]:
    """Find what the code of a function reads by itself; ``owner``: whose method it is."""
    code = function.__code__
    known: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            known[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    if owner is not None and code.co_argcount:
        known[code.co_varnames[0]] = owner
    if _is_of_library(function):  # a wrapper around a function of the program
        yield from (Read(path, value) for value in known.values() if isinstance(value, types.FunctionType))
        return
    within = f"{path}: " if path else ""
    for name, is_global, attributes in loads(code):
        value = function.__globals__.get(name, _NOTHING) if is_global else known.get(name, _NOTHING)
        if value is _NOTHING:
            continue
        read = _resolved(f"{within}{name}", value, attributes, owner is not None and value is owner)
        if not _is_of_another_package(read.value, function):
            yield read
        elif isinstance(read.value, types.MethodType):
            yield read._replace(value=read.value.__self__)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield Read(f"{path}.<default>", default)


def _resolved(name: str, value: Any, attributes: _Attributes, is_owner: bool) -> Read:
    """Follow attributes as far as they lead to objects, and do not run code of properties."""
    of_owner = is_owner and not isinstance(value, nn.Module)
    for attribute in attributes:
        if isinstance(value, torch.Tensor) or (isinstance(value, types.ModuleType) and is_of_library(value.__name__)):
            break
        held = _attribute(value, attribute)
        if held is _NOTHING:
            break
        name, value = f"{name}.{attribute}", held
    return Read(name, value, of_owner)


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, nn.Module):
        for table in (parameters_of(value), buffers_of(value), children_of(value)):
            if name in table:
                return table[name]
    held = inspect.getattr_static(value, name, _NOTHING)
    if isinstance(held, staticmethod):
        return held.__func__
    if isinstance(held, classmethod):
        return types.MethodType(held.__func__, value if isinstance(value, type) else type(value))
    if isinstance(value, type | types.ModuleType):
        return held
    if isinstance(held, property) and held.fget is not None and not isinstance(value, nn.Module):
        return types.MethodType(held.fget, value)  # one of a module, such as its dtype, is no weight
    if isinstance(held, types.FunctionType) and name not in getattr(value, "__dict__", {}):
        return types.MethodType(held, value)
    if isinstance(held, types.MemberDescriptorType):
        return getattr(value, name, _NOTHING)  # a slot
    if inspect.ismethoddescriptor(held) or inspect.isgetsetdescriptor(held):
        return _NOTHING  # of a class in C, such as dict.values: it reads the whole object
    return held


@functools.cache
def loads(code: types.CodeType) -> tuple[tuple[str, bool, _Attributes], ...]:
    """List the variables that code reads: name, whether it is a global one, and the attributes that are read of it."""
    found: list[tuple[str, bool, _Attributes]] = []
    instructions = list(dis.get_instructions(code))
    first_argument = code.co_varnames[:1]  # may be the owner
    for place, instruction in enumerate(instructions):
        kind, name = instruction.opname, instruction.argval
        is_global, is_local = kind in ("LOAD_GLOBAL", "LOAD_NAME"), kind.startswith("LOAD_FAST")
        if is_local and isinstance(name, tuple):  # two variables; attributes are of the last
            name = name[-1]
        if is_global or (is_local and name in first_argument) or kind.startswith("LOAD_DEREF"):
            attributes = []
            for following in instructions[place + 1 :]:
                if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                    break
                attributes.append(following.argval)
            found.append((name, is_global, tuple(attributes)))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            own = {*constant.co_varnames}
            found += [load for load in loads(constant) if load[1] or load[0] not in own]
    return tuple(dict.fromkeys(found))


def _is_of_library(function: types.FunctionType) -> bool:
    return is_of_library(_module_name(function))


def _is_of_another_package(value: Any, caller: types.FunctionType) -> bool:
    """Return whether ``value`` is a function of an installed package that is not the caller's: it knows no layer."""
    function = value.__func__ if isinstance(value, types.MethodType) else value
    if not isinstance(function, types.FunctionType) or "site-packages" not in function.__code__.co_filename:
        return False
    return _module_name(function).partition(".")[0] != _module_name(caller).partition(".")[0]


def _module_name(function: types.FunctionType) -> str:
    return str(function.__globals__.get("__name__", ""))
