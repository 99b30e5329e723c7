"""Refuse a DeepSpeed that lacks a name which this package relies on, by that name, before anything is built."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import deepspeed
from packaging.version import InvalidVersion, Version

from ds_dynmo.engine.deepspeed.names import BELOW, NEEDED, OLDEST, TESTED, PrivateName
from ds_dynmo.errors import ConfigError


def check_deepspeed(needed: Iterable[PrivateName] = NEEDED) -> None:
    """Refuse a version of DeepSpeed that is out of range, or lacks one of the names ``needed``.

    Raises:
        ConfigError: says which versions are known to work.
    """
    if not _in_range(deepspeed.__version__):
        raise ConfigError(f"deepspeed {deepspeed.__version__}: ds_dynmo works with {_range()}")
    missing = [problem for name in needed if (problem := _problem(name)) is not None]
    if missing:
        raise ConfigError(
            f"deepspeed {deepspeed.__version__}: {'; '.join(missing)}. Moving layers relies on it: install {_range()}"
        )


def _range() -> str:
    return f"deepspeed >= {OLDEST} and < {BELOW} (tested: {', '.join(TESTED)})"


def _in_range(version: str) -> bool:
    try:
        return Version(OLDEST) <= Version(version) < Version(BELOW)
    except InvalidVersion:
        return False


_ABSENT = object()


def _problem(name: PrivateName) -> str | None:
    """Describe what is wrong with a name; None if nothing is."""
    try:
        owner = _owner(name.owner)
    except (ImportError, AttributeError):
        return f"it has no {name.owner.replace(':', '.')}"
    if inspect.getattr_static(owner, name.name, _ABSENT) is _ABSENT:
        of_instances = isinstance(owner, type) and name.name in _mentioned(owner)
        return None if of_instances else f"it has no {name}"
    if name.takes:
        known = inspect.signature(getattr(owner, name.name)).parameters
        lacking = [parameter for parameter in name.takes if parameter not in known]
        if lacking:
            return f"{name} takes no {', '.join(lacking)}"
    return None


def _owner(path: str) -> Any:
    module, _, kind = path.partition(":")
    owner: Any = importlib.import_module(module)
    return getattr(owner, kind) if kind else owner


@cache
def _mentioned(owner: type) -> frozenset[str]:
    """Collect the names in the code of a class and of its bases, among them the attributes of its instances."""
    codes = [code for function in _functions(owner) for code in _nested(function.__code__)]
    return frozenset(name for code in codes for name in code.co_names)


def _functions(owner: type) -> Iterator[FunctionType]:
    for kind in owner.__mro__:
        for value in list(vars(kind).values()):
            function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
            if isinstance(function, FunctionType):
                yield function


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
