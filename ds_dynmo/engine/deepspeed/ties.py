"""Layers tied by one key: uses of one module, which each stage with a use holds once.

All uses are of one class and built from the same arguments; a ``forward_fn`` says what a use does with the module. So
stages share the whole module, and every parameter of it gets the sum of the gradients of all uses. By itself DeepSpeed
sums what ``tied_weight_attr`` names. What that does not name (the positions in Megatron's embedding) one use alone may
train: the one that runs the whole module, or the first if all have a ``forward_fn``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.module import layer_specs
from ds_dynmo.errors import ConfigError


def uses_by_key(specs: Sequence[Any]) -> dict[str, list[int]]:
    """Map each key that several layers have to those layers."""
    uses_of: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            uses_of.setdefault(str(spec.key), []).append(index)
    return {key: uses for key, uses in uses_of.items() if len(uses) > 1}


# -- what is refused ----------------------------------------------------------------------------------


def check_uses(specs: Sequence[Any]) -> None:
    """Refuse uses of a key that would be different modules.

    Raises:
        ConfigError: naming layers and key, and showing what to write.
    """
    for key, uses in uses_by_key(specs).items():
        first = specs[uses[0]]
        for use in uses[1:]:
            if (differs := _difference(first, specs[use])) is not None:
                kind, weights = first.typename.__name__, first.tied_weight_attr
                raise ConfigError(
                    f"layers {uses[0]} and {use}, tied by the key {key!r}: {differs}. Let one class serve both, with a "
                    "forward_fn for what the other does with it, and put what only one of them has (a norm) into a "
                    f"layer of its own:\n"
                    f"    TiedLayerSpec({key!r}, {kind}, ..., tied_weight_attr={weights!r})\n"
                    f"    TiedLayerSpec({key!r}, {kind}, ..., tied_weight_attr={weights!r}, "
                    f"forward_fn=lambda layer, hidden: torch.nn.functional.linear(hidden, layer.{weights[0]}))"
                )


def _difference(first: TiedLayerSpec, other: TiedLayerSpec) -> str | None:
    """Describe how two uses differ in what is built; None: they are one module."""
    if first.typename is not other.typename:
        return f"the classes differ, {first.typename.__name__} and {other.typename.__name__}"
    if first.tied_weight_attr != other.tied_weight_attr:
        return f"tied_weight_attr differs, {first.tied_weight_attr} and {other.tied_weight_attr}"
    try:
        same = bool(first.module_args == other.module_args and first.module_kwargs == other.module_kwargs)
    except Exception:  # whatever the comparison of a user's objects raises: then they are not known to be equal
        same = False
    return None if same else f"{first.typename.__name__} is built from different arguments, or arguments without =="


def check_tied_weights(model: PipelineModule) -> None:
    """Refuse tied layers of this stage whose ``tied_weight_attr`` names no parameter, or too few of them.

    Raises:
        ConfigError: naming the key.
    """
    specs = layer_specs(model)
    for key, uses in uses_by_key(specs).items():
        if key not in model.tied_modules:
            continue
        try:
            untied = [name for name, _ in untied_parameters(model.tied_modules[key], specs[uses[0]])]
        except (AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(f"layers {uses}, tied by the key {key!r}: {error}") from error
        whole = [use for use in uses if specs[use].forward_fn is None]
        if untied and len(whole) > 1:
            raise ConfigError(
                f"layers {whole}, tied by the key {key!r}, run the whole module, but tied_weight_attr does not name "
                f"{untied}: name them too, or give all but one of the layers a forward_fn that needs what is named"
            )


def untied_parameters(module: nn.Module, spec: TiedLayerSpec) -> list[tuple[str, nn.Parameter]]:
    """List the parameters of a tied module that ``tied_weight_attr`` does not name.

    Raises:
        AttributeError, RecursionError: it has nothing of a name there.
        TypeError: what it has is no parameter.
    """
    tied = {name: PipelineModule._recursive_getattr(module, name) for name in spec.tied_weight_attr}
    parameters = {id(parameter): (name, parameter) for name, parameter in module.named_parameters()}
    for name, weight in tied.items():
        if id(weight) not in parameters:
            raise TypeError(f"tied_weight_attr {name!r} is no parameter of it but a {type(weight).__name__}")
    named = {*map(id, tied.values())}
    return [found for identity, found in parameters.items() if identity not in named]


# -- between stages -----------------------------------------------------------------------------------


def share_whole_modules(model: PipelineModule) -> None:
    """Let DeepSpeed share every parameter of tied modules between stages, and make them equal now. Collective."""
    for key, comm in model.tied_comms.items():
        comm["weight_attr"] = _all_names(model, key)
    with torch.no_grad():  # else torch warns of gradients through the broadcast
        model._synchronize_tied_weights()


def _all_names(model: PipelineModule, key: str) -> list[str]:
    """List the names of a tied module's parameters: those that ``tied_weight_attr`` has, then the others."""
    spec = next(spec for spec in layer_specs(model) if isinstance(spec, TiedLayerSpec) and str(spec.key) == str(key))
    return [*spec.tied_weight_attr, *(name for name, _ in untied_parameters(model.tied_modules[key], spec))]


def tied_ranks(stages_of: Mapping[str, Sequence[int]], grid: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each key that several stages share, with their ranks, once for each replica and tensor-parallel slice.

    Args:
        stages_of: by key, the stages that hold a use of it.
        grid: DeepSpeed's, which lists the ranks by stage for each replica and slice.
    """
    for key, stages in stages_of.items():
        if len(stages) > 1:
            for pipeline in grid.pipe_groups:
                yield key, tuple(pipeline[stage] for stage in stages)


def tied_comms(
    module: PipelineModule,
    tied: Iterable[tuple[str, tuple[int, ...]]],
    make_group: Callable[[tuple[int, ...]], Any],
) -> dict[str, dict[str, Any]]:
    """Make DeepSpeed's ``tied_comms``: per key that this rank shares with other stages, the group and the module.

    Collective: every rank asks for the groups of every replica, in one order.

    Args:
        tied: of :func:`tied_ranks`.
        make_group: makes a process group of ranks; collective.
    """
    comms = {}
    for key, ranks in tied:
        group = make_group(ranks)
        if module.global_rank in ranks:
            comms[key] = {
                "ranks": list(ranks),
                "group": group,
                "weight_attr": _all_names(module, key),
                "module": module.tied_modules[key],
            }
    return comms
