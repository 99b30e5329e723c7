"""Layers tied by one key that are more than one module: they share weights, and each use has a module of its own.

DeepSpeed ties what ``tied_weight_attr`` names, and builds the first use of a key on each stage. Where all uses are
one class built from the same arguments, whose parameters are all tied, a stage needs one module for all of them.
Anything else is an :class:`SeparateUses`: an embedding and a head of another class, or a head with a norm of its own.
Each use then is a layer like any other, with a copy of the tied weights; copies begin equal, get the sum of all
gradients, and so stay equal wherever they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.module import layer_specs, own_layers
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import children_of


@dataclass(frozen=True)
class SeparateUses:
    """The uses of one key, each with a module of its own.

    Attributes:
        weights: per use, by its layer's number, the names of the tied weights there; in one order for all uses.
        alike: the same class and arguments, or nothing beside the tied weights: what is saved of the first use will
            do for any.
    """

    key: str
    weights: dict[int, tuple[str, ...]]
    alike: bool

    @property
    def uses(self) -> list[int]:
        return sorted(self.weights)

    @property
    def num_weights(self) -> int:
        """How many weights the uses share."""
        return len(self.weights[self.uses[0]])


@dataclass(frozen=True)
class UseFound:
    """What one rank finds at the first use of a key on its stage.

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
    found: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            found.setdefault(str(spec.key), []).append(index)
    return {key: uses for key, uses in found.items() if len(uses) > 1}


def of_several_classes(specs: Sequence[Any], uses: Sequence[int]) -> bool:
    """Return whether the uses of a key are of different classes."""
    return len({specs[use].typename for use in uses}) > 1


def find_uses(model: PipelineModule, built: Mapping[int, nn.Module]) -> list[UseFound]:
    """Describe the tied layers of this stage of a pipeline that was just built.

    Args:
        built: modules of layers that DeepSpeed did not build.
    """
    specs, local = layer_specs(model), own_layers(model)
    found = []
    for key, uses in uses_by_key(specs).items():
        here = [use for use in uses if use in local]
        modules = {**dict.fromkeys(here[:1], children_of(model.tied_modules).get(key)), **built}
        found += [_describe(specs, use, uses, module) for use in here if (module := modules.get(use)) is not None]
    return found


def _describe(specs: Sequence[Any], layer: int, uses: Sequence[int], module: nn.Module) -> UseFound:
    spec, others = specs[layer], [specs[use] for use in uses]
    try:
        weights, problem = [tied_weight(module, name) for name in spec.tied_weight_attr], None
    except (AttributeError, TypeError, RecursionError) as error:
        weights, problem = [], f"layer {layer} ({type(module).__name__}): {error}"
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    return UseFound(
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


def separate_uses(every: Iterable[Sequence[UseFound]], specs: Sequence[Any]) -> dict[str, SeparateUses]:
    """Find the keys whose uses have modules of their own. The same on every rank.

    Args:
        every: each rank's :func:`find_uses`.

    Raises:
        ConfigError: uses whose tied weights do not belong together.
    """
    found = {use.layer: use for of_rank in every for use in of_rank}
    ties = {}
    for key, uses in uses_by_key(specs).items():
        built = [found[use] for use in uses if use in found]
        one_class, equal = all(use.same_class for use in built), all(use.same_arguments for use in built)
        complete = all(use.complete for use in built)
        apart = len(built) == len(uses)
        if one_class and ((equal and complete) or not apart):
            continue  # of one class, DeepSpeed makes those on a stage one module
        assert apart, "what DeepSpeed did not build of several classes was built here"
        _check_weights(key, built)
        weights = {use.layer: use.names for use in built}
        ties[key] = SeparateUses(key, weights, alike=one_class and (equal or complete))
    return ties


def _check_weights(key: str, built: Sequence[UseFound]) -> None:
    problem = next((use.problem for use in built if use.problem is not None), None)
    if problem is not None:
        raise ConfigError(f"layers tied by the key {key!r}: {problem}")
    if len({use.shapes for use in built}) > 1:
        shapes = {use.layer: [list(shape) for shape in use.shapes] for use in built}
        raise ConfigError(
            f"layers tied by the key {key!r}: tied_weight_attr names weights of other shapes in each: {shapes}"
        )
