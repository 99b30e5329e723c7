"""Pickle anything between the ranks of one job, tensors apart; modules that cannot be pickled are taken apart.

A module whose attribute is a lambda, or whose hook is a closure, cannot be pickled. It becomes :class:`Dismantled`:
all of it that can be pickled, its children whole where they can be. The receiver puts it into a shell that it builds
from the layer's spec.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

NOT_PICKLABLE = (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError)

_MODULE_MACHINERY = frozenset(vars(nn.Module()))


class _Pickler(pickle.Pickler):
    """Pickles anything; tensors are collected, each object once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._number: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._number:
            self._number[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._number[id(obj)]


class _Unpickler(pickle.Unpickler):
    """Loads what :class:`_Pickler` wrote on another rank of the same job."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def dump(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """``value`` as bytes that refer to its tensors by number, and the tensors."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def load(data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """What was dumped, around ``tensors``."""
    return _Unpickler(io.BytesIO(data), tensors).load()


def can_be_pickled(value: Any) -> bool:
    """Would :func:`dump` take it?"""
    try:
        dump(value)
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


def dismantle(module: nn.Module) -> Dismantled:
    """Take ``module`` apart, and of its children those that cannot be pickled."""
    own = {name: value for name, value in vars(module).items() if name not in _MODULE_MACHINERY}
    return Dismantled(
        parameters=dict(module._parameters),
        buffers=dict(module._buffers),
        non_persistent=set(module._non_persistent_buffers_set),
        attributes={name: value for name, value in own.items() if can_be_pickled(value)},
        training=module.training,
        extra_state=module.get_extra_state() if _has_extra_state(module) else None,
        children={
            name: child if child is None or can_be_pickled(child) else dismantle(child)
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
    """Paths of the parts that ``shell`` has no module for."""
    missing = []
    for name, child in parts.children.items():
        if isinstance(child, Dismantled):
            room = shell._modules.get(name)
            missing += [path + name] if room is None else missing_in(room, child, f"{path}{name}.")
    return missing


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever is drawn inside leaves every random number generator as it was."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)
