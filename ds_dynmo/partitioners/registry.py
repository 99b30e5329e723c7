"""Balancers by name: the ``"balancer"`` of the JSON block.

The dict below is the package's only mutable global: names are taken at import time and never given back.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from ds_dynmo.errors import ConfigError, PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners.checks import check_costs
from ds_dynmo.partitioners.memory import MemoryModel
from ds_dynmo.partitioners.pipeline import PipelineModel
from ds_dynmo.plan import check_partition

__all__ = ["Balancer", "current_name", "get", "names", "propose", "register", "takes"]

OFFERED = ("pipeline", "speeds", "layer_bytes")  # what a balancer gets too, if it has a parameter of that name


class Balancer(Protocol):
    """Chooses a partition: the same one on every rank, for the same arguments.

    One that also has a parameter ``pipeline`` gets a :class:`PipelineModel` by that keyword, or None where layers are
    balanced by something else than time. One that has ``speeds`` gets the stages' relative speeds, or None where all
    are taken to be equal; its costs are then those on a stage of speed 1, without ``speeds`` those that were measured.
    One that has ``layer_bytes`` gets, per layer, what moves with it, or None where that is not known.

    Where layers have to stay together, each group of them is one layer to a balancer, in all that it gets and gives.
    """

    def __call__(
        self, costs: Sequence[float], num_stages: int, *, start: Sequence[int], memory: MemoryModel | None
    ) -> Sequence[int]:
        """Boundaries, ``num_stages + 1`` ints.

        Args:
            costs: per layer, finite and >= 0.
            start: the partition in force.
            memory: None where nothing limits it.
        """


class _Registered(NamedTuple):
    balancer: Any
    takes: frozenset[str]  # those of OFFERED


_BALANCERS: dict[str, _Registered] = {}
_RENAMED = {"schedule": "makespan"}  # old name: present one

AnyBalancer = TypeVar("AnyBalancer", bound=Callable[..., Any])


def register(name: str) -> Callable[[AnyBalancer], AnyBalancer]:
    """Decorator: make a :class:`Balancer` known as ``name``. What it takes is read from its signature, once, here.

    Raises:
        ConfigError: the name is taken.
    """

    def add(balancer: AnyBalancer) -> AnyBalancer:
        if name in _BALANCERS or name in _RENAMED:
            raise ConfigError(f'a balancer named "{name}" is registered already')
        _BALANCERS[name] = _Registered(balancer, _offered_to(balancer))
        return balancer

    return add


def _offered_to(balancer: Callable[..., Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(balancer).parameters.values()
    except ValueError:  # a callable without a signature that Python can read
        return frozenset()
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_keyword) & set(OFFERED)


def propose(
    name: str,
    costs: Sequence[float],
    num_stages: int,
    *,
    start: Sequence[int],
    memory: MemoryModel | None,
    pipeline: PipelineModel | None,
    speeds: Sequence[float] | None,
    layer_bytes: Sequence[int] | None = None,
    groups: LayerGroups | None = None,
) -> Sequence[int]:
    """What the balancer registered as ``name`` chooses, given what it takes.

    Args:
        layer_bytes: per layer, what moves with it; None: not known.
        groups: where it may cut; None: anywhere. The balancer is given groups for layers. A ``start`` that cuts where
            it may not counts as the nearest one that does not.

    Raises:
        PartitionError: as the balancer; more stages than groups; of groups, what the balancer gives is no partition.
    """
    if groups is None or groups.single_layers:
        offers = {"pipeline": pipeline, "speeds": speeds, "layer_bytes": layer_bytes}
        return _choose(name, costs, num_stages, start=start, memory=memory, offers=offers)
    if (problem := groups.shortage(num_stages)) is not None:
        raise PartitionError(problem)
    chosen = _choose(
        name,
        groups.fold(check_costs(costs)),
        num_stages,
        start=list(groups.fold_partition(groups.nearest(start))),
        memory=memory.folded(groups) if memory is not None else None,
        offers={
            "pipeline": pipeline.folded(groups) if pipeline is not None else None,
            "speeds": speeds,
            "layer_bytes": groups.fold_ints(layer_bytes) if layer_bytes is not None else None,
        },
    )
    try:
        partition = check_partition(chosen, groups.num_groups, num_stages)
    except PartitionError as error:
        raise PartitionError(f'balancer "{name}", given {groups.num_groups} groups of layers: {error}') from error
    return list(groups.unfold_partition(partition))


def _choose(
    name: str,
    costs: Sequence[float],
    num_stages: int,
    *,
    start: Sequence[int],
    memory: MemoryModel | None,
    offers: dict[str, Any],
) -> Sequence[int]:
    wanted = {offered: value for offered, value in offers.items() if takes(name, offered)}
    partition: Sequence[int] = _registered(name).balancer(costs, num_stages, start=start, memory=memory, **wanted)
    return partition


def takes(name: str, offered: str) -> bool:
    """Has the balancer registered as ``name`` a parameter ``offered``, one of :data:`OFFERED`?"""
    return offered in _registered(name).takes


def get(name: str) -> Any:
    """The balancer registered as ``name``, as it was registered.

    Raises:
        ConfigError: there is none: says the nearest right name and all of them.
    """
    return _registered(name).balancer


def current_name(name: str) -> str:
    """Give ``name``, or, with a DeprecationWarning, the name that it was changed to."""
    if name not in _RENAMED:
        return name
    new = _RENAMED[name]
    warnings.warn(f'balancer "{name}" is called "{new}" now: write "{new}"', DeprecationWarning, stacklevel=3)
    return new


def _registered(name: str) -> _Registered:
    name = current_name(name)
    if name in _BALANCERS:
        return _BALANCERS[name]
    near = difflib.get_close_matches(name, _BALANCERS, n=1)
    hint = f', did you mean "{near[0]}"?' if near else ";"
    raise ConfigError(f'no balancer is named "{name}"{hint} registered: {", ".join(names())}')


def names() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_BALANCERS)
