"""Balancers by name: the ``"balancer"`` of the JSON block.

The dict below is the package's only mutable global: names are taken at import time and never given back.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ds_dynmo.errors import ConfigError
from ds_dynmo.partitioners.memory import MemoryModel

__all__ = ["Balancer", "get", "names", "register"]


class Balancer(Protocol):
    """Chooses a partition: the same one on every rank, for the same arguments."""

    def __call__(
        self, costs: Sequence[float], num_stages: int, *, start: Sequence[int], memory: MemoryModel | None
    ) -> Sequence[int]:
        """Boundaries, ``num_stages + 1`` ints.

        Args:
            costs: per layer, finite and >= 0.
            start: the partition in force.
            memory: None where nothing limits it.
        """


_BALANCERS: dict[str, Balancer] = {}

AnyBalancer = TypeVar("AnyBalancer", bound=Balancer)


def register(name: str) -> Callable[[AnyBalancer], AnyBalancer]:
    """Decorator: make a balancer known as ``name``.

    Raises:
        ConfigError: the name is taken.
    """

    def add(balancer: AnyBalancer) -> AnyBalancer:
        if name in _BALANCERS:
            raise ConfigError(f'a balancer named "{name}" is registered already')
        _BALANCERS[name] = balancer
        return balancer

    return add


def get(name: str) -> Balancer:
    """The balancer registered as ``name``.

    Raises:
        ConfigError: there is none: says the nearest right name and all of them.
    """
    if name in _BALANCERS:
        return _BALANCERS[name]
    near = difflib.get_close_matches(name, _BALANCERS, n=1)
    hint = f', did you mean "{near[0]}"?' if near else ";"
    raise ConfigError(f'no balancer is named "{name}"{hint} registered: {", ".join(names())}')


def names() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_BALANCERS)
