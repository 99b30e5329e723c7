"""Pickle anything between the ranks of one job, tensors apart; modules that cannot be pickled are taken apart.

A module whose attribute is a lambda, or whose hook is a closure, cannot be pickled. It becomes :class:`Dismantled`:
all of it that can be pickled, its children whole where they can be. The receiver puts it into a shell that it builds
from the layer's spec.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_dynmo.engine.serialization.object_graph import MODULE_MACHINERY

NOT_PICKLABLE = (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError)


_NO_REFERENCES: Mapping[int, int] = {}


class _Pickler(pickle.Pickler):
    """Pickle anything: tensors are collected, each once, and references are written as their numbers."""

    def __init__(self, file: io.BytesIO, references: Mapping[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._number: dict[int, int] = {}
        self._references = references

    def persistent_id(self, obj: Any) -> int | None:
        if id(obj) in self._references:
            return -1 - self._references[id(obj)]
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._number:
            self._number[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._number[id(obj)]


class _Unpickler(pickle.Unpickler):
    """Load what :class:`_Pickler` wrote on another rank of the same job."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor], references: Sequence[Any]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._references = references

    def persistent_load(self, pid: int) -> Any:
        return self._tensors[pid] if pid >= 0 else self._references[-1 - pid]


def dump(value: Any, references: Mapping[int, int] = _NO_REFERENCES) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle ``value`` to bytes that refer to its tensors by number, and return the tensors too.

    Args:
        references: by ``id``, the number of each object that is not pickled: who loads it has one of its own.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, references)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def load(data: bytes, tensors: Sequence[torch.Tensor], references: Sequence[Any] = ()) -> Any:
    """Load what was dumped, around ``tensors`` and ``references``."""
    return _Unpickler(io.BytesIO(data), tensors, references).load()


def can_be_pickled(value: Any, references: Mapping[int, int] = _NO_REFERENCES) -> bool:
    """Tell whether :func:`dump` would take it."""
    try:
        dump(value, references)
    except NOT_PICKLABLE:
        return False
    return True


# -- modules that cannot be pickled -------------------------------------------------------------------


@dataclass
class Dismantled:
    """What can be pickled of a module that cannot.

    Attributes:
        attributes: plain ones; those that cannot be pickled are the shell's.
        children: per name, a module, its parts if it cannot be pickled either, or None.
    """

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    non_persistent: set[str]
    attributes: dict[str, Any]
    training: bool
    extra_state: Any
    children: dict[str, Any]


def dismantle(
    module: nn.Module,
    references: Mapping[int, int] = _NO_REFERENCES,
    of_rank: Mapping[int, Container[str]] | None = None,
) -> Dismantled:
    """Take ``module`` apart, and of its children those that cannot be pickled whole.

    Args:
        references: see :func:`dump`.
        of_rank: by ``id`` of a module, attributes that stay behind: the shell's are to be used.
    """
    of_rank = of_rank or {}
    left = of_rank.get(id(module), ())
    own = {name: value for name, value in vars(module).items() if name not in MODULE_MACHINERY and name not in left}

    def whole(child: nn.Module | None) -> bool:
        if child is None or id(child) in references:
            return True
        return not any(id(part) in of_rank for part in child.modules()) and can_be_pickled(child, references)

    return Dismantled(
        parameters=dict(module._parameters),
        buffers=dict(module._buffers),
        non_persistent=set(module._non_persistent_buffers_set),
        attributes={name: value for name, value in own.items() if can_be_pickled(value, references)},
        training=module.training,
        extra_state=module.get_extra_state() if _has_extra_state(module) else None,
        children={
            name: child if child is None or whole(child) else dismantle(child, references, of_rank)
            for name, child in module._modules.items()
        },
    )


def assemble(shell: nn.Module, parts: Dismantled) -> nn.Module:
    """Put ``parts`` into ``shell``, a module of the same class."""
    for name, value in parts.attributes.items():
        setattr(shell, name, value)
    children = {
        name: assemble(shell._modules[name], child) if isinstance(child, Dismantled) else child  # type: ignore[arg-type]
        for name, child in parts.children.items()
    }
    for held, new in (
        (shell._parameters, parts.parameters),
        (shell._buffers, parts.buffers),
        (shell._modules, children),
    ):
        held.clear()
        held.update(new)  # type: ignore[arg-type]
    shell._non_persistent_buffers_set = set(parts.non_persistent)
    shell.training = parts.training
    if _has_extra_state(shell):
        shell.set_extra_state(parts.extra_state)
    return shell


def missing_in(shell: nn.Module, parts: Dismantled, path: str = "") -> list[str]:
    """List the paths of parts that ``shell`` has no module for."""
    missing = []
    for name, child in parts.children.items():
        if isinstance(child, Dismantled):
            built = shell._modules.get(name)
            missing += [path + name] if built is None else missing_in(built, child, f"{path}{name}.")
    return missing


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave every random number generator as it was, whatever is drawn inside."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
