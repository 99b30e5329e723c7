"""The registry of balancers by the name that ``"balancer"`` in the JSON file takes, and their calls.

Its dict is the package's only mutable global: names are added and never removed.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar

from ds_dynmo.errors import ConfigError, PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners.checks import check_costs
from ds_dynmo.partitioners.memory import MemoryModel
from ds_dynmo.partitioners.pipeline import PipelineModel
from ds_dynmo.plan import check_partition

__all__ = ["Balancer", "accepts", "check_signature", "get", "names", "propose", "register"]

OPTIONAL_ARGUMENTS = ("pipeline", "speeds", "layer_bytes", "owners")  # passed to balancers with such a parameter


class Balancer(Protocol):
    """A function that chooses a partition. Equal arguments must give an equal partition on every rank.

    Parameters of these names are optional, and are passed by keyword:

    - ``pipeline``: a :class:`PipelineModel`; None if layers are balanced by something else than time.
    - ``speeds``: the relative speeds of the stages; None: all are equal. With this parameter, costs are those on a
      stage of speed 1; without it, they are those measured.
    - ``layer_bytes``: per layer, the bytes that move with it; None: unknown.
    - ``owners``: per chunk, the stage that holds it; None: a chain. Without this parameter the balancer is for chains
      only.

    If layers are kept together, each group of them is one layer to a balancer, in its arguments and its result.
    """

    def __call__(
        self, costs: Sequence[float], num_stages: int, *, start: Sequence[int], memory: MemoryModel | None
    ) -> Sequence[int]:
        """Choose boundaries: one more int than there are chunks, of which a chain has one per stage.

        Args:
            costs: per layer, finite and >= 0.
            start: the current partition.
            memory: the memory model; None: no limit.
        """


class _Registered(NamedTuple):
    balancer: Any
    accepted: frozenset[str]  # a subset of OPTIONAL_ARGUMENTS


_BALANCERS: dict[str, _Registered] = {}

AnyBalancer = TypeVar("AnyBalancer", bound=Callable[..., Any])


def register(name: str) -> Callable[[AnyBalancer], AnyBalancer]:
    """Decorate a :class:`Balancer` to register it as ``name``. It gets the optional arguments in its signature.

    Raises:
        ConfigError: the name is taken.
    """

    def add(balancer: AnyBalancer) -> AnyBalancer:
        if name in _BALANCERS:
            raise ConfigError(f'a balancer named "{name}" is registered already')
        _BALANCERS[name] = _Registered(balancer, _accepted_by(balancer))
        return balancer

    return add


def _accepted_by(balancer: Callable[..., Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(balancer).parameters.values()
    except ValueError:  # a callable without a signature that Python can read
        return frozenset()
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    keywords = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
    return frozenset(keywords.intersection(OPTIONAL_ARGUMENTS))


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
    owners: Sequence[int] | None = None,
) -> Sequence[int]:
    """Call the balancer registered as ``name`` with the arguments that it accepts.

    Args:
        layer_bytes: per layer, the bytes that move with it; None: unknown.
        groups: groups of layers that no partition may cut; they are layers to the balancer. None: it may cut anywhere.
            If ``start`` cuts a group, the balancer gets the nearest partition that does not.
        owners: per chunk, the stage that holds it; None: a chain.

    Raises:
        PartitionError: from the balancer; or more chunks than groups; or the balancer returns an invalid partition of
            groups, or gives boundaries of a chain where stages own two chunks.
    """
    num_chunks = num_stages if owners is None else len(owners)
    if num_chunks > num_stages and not accepts(name, "owners"):
        raise PartitionError(
            f'balancer "{name}" gives boundaries of a chain, and every stage owns {num_chunks // num_stages} chunks: '
            f"give it a parameter owners and let it return {num_chunks + 1} boundaries, or train a chain"
        )
    owners = owners if num_chunks > num_stages else None
    if groups is None or groups.single_layers:
        optional = {"pipeline": pipeline, "speeds": speeds, "layer_bytes": layer_bytes, "owners": owners}
        return _choose(name, costs, num_stages, start=start, memory=memory, optional=optional)
    if (problem := groups.shortage(num_chunks, "stage" if owners is None else "chunk")) is not None:
        raise PartitionError(problem)
    chosen = _choose(
        name,
        groups.fold(check_costs(costs)),
        num_stages,
        start=list(groups.fold_partition(groups.nearest(start))),
        memory=memory.folded(groups) if memory is not None else None,
        optional={
            "pipeline": pipeline.folded(groups) if pipeline is not None else None,
            "speeds": speeds,
            "layer_bytes": groups.fold_ints(layer_bytes) if layer_bytes is not None else None,
            "owners": owners,
        },
    )
    try:
        partition = check_partition(chosen, groups.num_groups, num_chunks)
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
    optional: dict[str, Any],
) -> Sequence[int]:
    accepted = {argument: value for argument, value in optional.items() if accepts(name, argument)}
    partition: Sequence[int] = _registered(name).balancer(costs, num_stages, start=start, memory=memory, **accepted)
    return partition


def check_signature(name: str) -> None:
    """Refuse a balancer that cannot be called with the arguments that it will get.

    Raises:
        ConfigError: with its signature, and the call.
    """
    balancer = get(name)
    try:
        signature = inspect.signature(balancer)
    except ValueError:  # a callable without a signature that Python can read
        return
    keywords = ["start", "memory", *(argument for argument in OPTIONAL_ARGUMENTS if accepts(name, argument))]
    try:
        signature.bind([], 1, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join(["costs", "num_stages", *(f"{keyword}=..." for keyword in keywords)])
        raise ConfigError(
            f'dynmo.balancer = "{name}": is called as balancer({call}), and its signature is {signature}: {error}'
        ) from error


def accepts(name: str, argument: str) -> bool:
    """Return whether the balancer registered as ``name`` accepts ``argument``, one of :data:`OPTIONAL_ARGUMENTS`."""
    return argument in _registered(name).accepted


def get(name: str) -> Any:
    """Return the balancer registered as ``name``, or imported from ``"module:function"``.

    Raises:
        ConfigError: no such balancer; the message has the nearest name, all names, and how to import one. Or it cannot
            be imported; the message says why.
    """
    return _registered(name).balancer


def _registered(name: str) -> _Registered:
    if ":" in name and name not in _BALANCERS:
        register(name)(_imported(*name.split(":", maxsplit=1)))
    if name in _BALANCERS:
        return _BALANCERS[name]
    near = difflib.get_close_matches(name, _BALANCERS, n=1)
    hint = f', did you mean "{near[0]}"?' if near else ";"
    raise ConfigError(
        f'no balancer is named "{name}"{hint} registered: {", ".join(names())}; "module:function" imports one of yours'
    )


def _imported(module: str, function: str) -> Any:
    """Import a function from Python's path or from the current folder, which is not on the path of commands.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        loaded = import_module(module)
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(
            f'module "{module}" cannot be imported from {here} or Python\'s path: {type(error).__name__}: {error}'
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    balancer = getattr(loaded, function, None)
    if not callable(balancer):
        raise ConfigError(f'{loaded} has no function "{function}"')
    return balancer


def names() -> list[str]:
    """Return all registered names, sorted."""
    return sorted(_BALANCERS)
