"""Layers tied by one key whose uses have separate modules that share weights.

DeepSpeed ties what ``tied_weight_attr`` names, and builds the first use of a key on each stage. If all uses are of one
class, are built from the same arguments and all their parameters are tied, a stage needs one module for all uses.
Otherwise they are :class:`SeparateUses`: an embedding and a head of another class, or a head that also has a norm.
Each use then is a layer like any other, with a copy of the tied weights. Copies begin equal and get the sum of all
gradients, so they stay equal on whichever stages they are.

    uses of a key       modules                             StageLayers.key(use)    StageLayers.tie_of(use)
    one module          one per stage; later uses there     the key                 None
                        run a tied alias
    separate modules    one per use, with weight copies     None                    the SeparateUses
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.module import layer_specs, layers_of_stage
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import children_of


@dataclass(frozen=True)
class SeparateUses:
    """The uses of one key, each with a separate module.

    Attributes:
        weights: per use, by its layer's number, the names of the tied weights there; in one order for all uses.
        alike: the same class and arguments, or nothing beside the tied weights: any use can be loaded from what is
            saved of the first.
    """

    key: str
    weights: dict[int, tuple[str, ...]]
    alike: bool

    @property
    def uses(self) -> list[int]:
        return sorted(self.weights)

    @property
    def num_weights(self) -> int:
        """The number of weights that the uses share."""
        return len(self.weights[self.uses[0]])


@dataclass(frozen=True)
class UseDescription:
    """The description of a tied layer on the rank that has it.

    Attributes:
        names, shapes: of its tied weights, in the order of ``tied_weight_attr``.
        complete: it has no other parameter.
        same_class, same_arguments: as all other uses of the key.
        problem: why its tied weights cannot be found, in words.
    """

    layer: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    complete: bool
    same_class: bool
    same_arguments: bool
    problem: str | None


def uses_by_key(specs: Sequence[Any]) -> dict[str, list[int]]:
    """Map each key that several layers have to those layers."""
    uses_of: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            uses_of.setdefault(str(spec.key), []).append(index)
    return {key: uses for key, uses in uses_of.items() if len(uses) > 1}


def of_several_classes(specs: Sequence[Any], uses: Sequence[int]) -> bool:
    """Return whether the uses of a key are of different classes."""
    return len({specs[use].typename for use in uses}) > 1


def find_uses(model: PipelineModule, built: Mapping[int, nn.Module]) -> list[UseDescription]:
    """Describe the tied layers of this stage of a pipeline that was just built.

    Args:
        built: modules of layers that DeepSpeed did not build.
    """
    specs, local = layer_specs(model), layers_of_stage(model)
    descriptions = []
    for key, uses in uses_by_key(specs).items():
        here = [use for use in uses if use in local]
        modules = {**dict.fromkeys(here[:1], children_of(model.tied_modules).get(key)), **built}
        for use in here:
            module = modules.get(use)
            if module is not None:
                descriptions.append(_describe(specs, use, uses, module))
    return descriptions


def _describe(specs: Sequence[Any], layer: int, uses: Sequence[int], module: nn.Module) -> UseDescription:
    spec, others = specs[layer], [specs[use] for use in uses]
    try:
        weights, problem = [tied_weight(module, name) for name in spec.tied_weight_attr], None
    except (AttributeError, TypeError, RecursionError) as error:
        weights, problem = [], f"layer {layer} ({type(module).__name__}): {error}"
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    return UseDescription(
        layer=layer,
        names=tuple(name_of[id(weight)] for weight in weights),
        shapes=tuple(tuple(weight.shape) for weight in weights),
        complete=name_of.keys() <= {id(weight) for weight in weights},
        same_class=not of_several_classes(specs, uses),
        same_arguments=all(_same_arguments(spec, other) for other in others),
        problem=problem,
    )


def tied_weight(module: nn.Module, name: str) -> nn.Parameter:
    """Find the parameter that an entry of ``tied_weight_attr`` names, as DeepSpeed does.

    Raises:
        AttributeError, RecursionError: there is none of that name.
        TypeError: it is no parameter of the module.
    """
    weight: nn.Parameter = PipelineModule._recursive_getattr(module, name)
    if not any(weight is parameter for parameter in module.parameters()):
        raise TypeError(f"tied_weight_attr {name!r} is no parameter of it but a {type(weight).__name__}")
    return weight


def _same_arguments(spec: TiedLayerSpec, other: TiedLayerSpec) -> bool:
    try:
        return bool(spec.module_args == other.module_args and spec.module_kwargs == other.module_kwargs)
    except Exception:  # whatever the comparison of a user's objects raises: then they are not known to be equal
        return False


def separate_uses(uses_by_rank: Iterable[Sequence[UseDescription]], specs: Sequence[Any]) -> dict[str, SeparateUses]:
    """Find the keys whose uses have separate modules. The same on every rank.

    Args:
        uses_by_rank: each rank's :func:`find_uses`.

    Raises:
        ConfigError: uses whose tied weights do not belong together.
    """
    described = {use.layer: use for of_rank in uses_by_rank for use in of_rank}
    ties = {}
    for key, uses in uses_by_key(specs).items():
        built = [described[use] for use in uses if use in described]
        one_class, equal = all(use.same_class for use in built), all(use.same_arguments for use in built)
        complete = all(use.complete for use in built)
        apart = len(built) == len(uses)
        if one_class and ((equal and complete) or not apart):
            continue  # DeepSpeed makes uses of one class on one stage one module
        assert apart, "missing_uses built the uses of several classes that DeepSpeed did not build"
        _check_weights(key, built)
        weights = {use.layer: use.names for use in built}
        ties[key] = SeparateUses(key, weights, alike=one_class and (equal or complete))
    return ties


def _check_weights(key: str, built: Sequence[UseDescription]) -> None:
    problem = next((use.problem for use in built if use.problem is not None), None)
    if problem is not None:
        raise ConfigError(f"layers tied by the key {key!r}: {problem}")
    if len({use.shapes for use in built}) > 1:
        shapes = {use.layer: [list(shape) for shape in use.shapes] for use in built}
        raise ConfigError(
            f"layers tied by the key {key!r}: tied_weight_attr names weights of other shapes in each: {shapes}"
        )
