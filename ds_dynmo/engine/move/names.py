"""Names of objects that several layers refer to, by which every rank finds its counterpart.

An object that was shared when the model was built has the same path on every rank. The path starts at

- the layer list, for what two of its entries refer to, such as a configuration that several LayerSpecs take;
- the ``PipelineModule``, for its attributes, such as the process grid;
- a global variable of a Python module, such as the arguments that Megatron's ``get_args()`` returns.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.module import HOLDS_LAYERS, layer_specs
from ds_dynmo.engine.move.object_graph import MODULE_MACHINERY, Path, children, follow, text, walk

_LAYER, _PIPELINE, _GLOBALS = "layer", "pipeline", "globals"
_TORCH_NEEDS = {"sympy", "mpmath", "networkx"}  # a third of all global variables, and none of a model
_LIBRARIES = frozenset(
    {*sys.stdlib_module_names, *_TORCH_NEEDS, "torch", "numpy", "deepspeed", "ds_dynmo"} - {"__main__"}
)
MOST_ENTRIES = 10_000  # larger containers are not searched for names: a loss function may hold a whole data set


@dataclass(frozen=True)
class ObjectName:
    """The path of an object on every rank: an anchor, and the steps from there.

    ``anchor`` is ``("layer", number)``, ``("pipeline", None)`` or ``("globals", name of a Python module)``.
    """

    anchor: tuple[str, Any]
    path: Path

    def __str__(self) -> str:
        kind, key = self.anchor
        return {_LAYER: f"layers[{key}]", _PIPELINE: "the PipelineModule"}.get(kind, str(key)) + text(self.path)


class Names:
    """The names of one rank's objects. Construction is collective.

    Args:
        pipeline: DeepSpeed's module, as built.
        modules: returns the present layers of this rank, by number.
        gather: gathers one picklable value of every rank.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        modules: Callable[[], Mapping[int, nn.Module]],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self._pipeline = pipeline
        self._modules = modules
        users = self._users(gather)
        # Both keep the objects alive, so that their ids are not reused.
        self._in_several = {key: part for key, (part, layers) in users.items() if len(layers) > 1}
        self._names = self._find_names({key: min(layers) for key, (_, layers) in users.items() if len(layers) == 1})
        self._given = {  # weak, as these have memory, which another rank may hold instead
            id(held): (weakref.ref(held), f"{name} of layer {layer}" if name else f"layer {layer}")
            for layer, spec in enumerate(layer_specs(pipeline))
            if isinstance(spec, nn.Module)
            for name, held in (*spec.named_modules(), *spec.named_parameters())
            if id(held) not in self._in_several
        }

    def of(self, value: Any) -> ObjectName | None:
        """Return the name of ``value`` in the layer list or the ``PipelineModule``; None if it has none."""
        entry = self._names.get(id(value))
        return entry[1] if entry is not None else None

    def is_shared(self, value: Any) -> bool:
        """Return whether ``value`` has a name, and so belongs to the rank rather than to a layer."""
        return id(value) in self._names

    def given_part(self, value: Any) -> str | None:
        """Say which part ``value`` was of a layer that was given as a module, on whichever stage; None: of none."""
        entry = self._given.get(id(value))
        return entry[1] if entry is not None and entry[0]() is value else None

    def is_of_one_layer(self, part: nn.Module) -> bool:
        """Return whether ``part``, which is registered in a layer, is registered in no other layer."""
        return id(part) not in self._in_several

    def find(self, name: ObjectName) -> Any:
        """Find the object with this name on this rank.

        Raises:
            LookupError: there is no such object.
        """
        kind, key = name.anchor
        if kind == _LAYER:
            start = layer_specs(self._pipeline)[key]
        else:
            start = self._pipeline if kind == _PIPELINE else sys.modules.get(key)
        return follow(start, name.path)

    def _users(self, gather: Callable[[Any], list[Any]]) -> dict[int, tuple[nn.Module, set[int]]]:
        """Map the ``id`` of each module that layers register to these layers. Tied layers count as the first of them.

        Layers given as modules are on every rank. Of modules among the arguments of LayerSpecs, only a rank that has
        built a layer knows which of them the layer registers, so the ranks exchange this.
        """
        users: dict[int, tuple[nn.Module, set[int]]] = {}
        first_use = self._first_uses()
        modules = {i: spec for i, spec in enumerate(layer_specs(self._pipeline)) if isinstance(spec, nn.Module)}
        for layer, module in {**modules, **self._modules()}.items():
            for part in module.modules():
                users.setdefault(id(part), (part, set()))[1].add(first_use[layer])
        specs = [((("item", i),), s) for i, s in enumerate(layer_specs(self._pipeline)) if isinstance(s, LayerSpec)]
        arguments = {path: part for path, part in walk(specs, lambda _: True) if isinstance(part, nn.Module)}
        mine = {path: sorted(users[id(part)][1]) for path, part in arguments.items() if id(part) in users}
        for theirs in gather(mine):
            for path in theirs.keys() & arguments.keys():
                users.setdefault(id(arguments[path]), (arguments[path], set()))[1].update(theirs[path])
        return users

    def _first_uses(self) -> list[int]:
        """Return, per layer, the first layer with the same tie key; the layer itself if it has no key."""
        first: dict[str | int, int] = {}
        specs = layer_specs(self._pipeline)
        keys = [str(spec.key) if isinstance(spec, TiedLayerSpec) else layer for layer, spec in enumerate(specs)]
        return [first.setdefault(key, layer) for layer, key in enumerate(keys)]

    def _find_names(self, owner: Mapping[int, int]) -> dict[int, tuple[Any, ObjectName]]:
        """Map the ``id`` of each shared object to the object and its name.

        Args:
            owner: by ``id`` of a module that one layer registers, that layer.
        """
        found: dict[int, tuple[Any, ObjectName]] = {}
        users: dict[int, int] = {}
        for layer, spec in enumerate(layer_specs(self._pipeline)):

            def enter(value: Any, layer: int = layer) -> bool:
                """Skip modules of another layer, and objects on the third visit: they are known to be shared."""
                return owner.get(id(value), layer) == layer and users[id(value)] <= 2

            for path, value in walk([((), spec)], enter):
                found.setdefault(id(value), (value, ObjectName((_LAYER, layer), path)))
                users[id(value)] = users.get(id(value), 0) + 1
        names = {key: found[key] for key, count in users.items() if count > 1}
        attributes = [((step,), value) for step, value in children(self._pipeline) if not _is_of_pipeline(step[1])]
        for path, value in walk(attributes, lambda value: id(value) not in owner and not _is_data(value)):
            names.setdefault(id(value), (value, ObjectName((_PIPELINE, None), path)))
        return {
            k: entry for k, entry in names.items() if k not in owner and not isinstance(entry[0], tuple | frozenset)
        }


class GlobalVariables:
    """The global variables of Python modules at the time of the first lookup.

    Those of the standard library, torch, numpy, DeepSpeed and ds_dynmo are left out.
    """

    def of(self, value: Any) -> ObjectName | None:
        """Return the name of ``value``; None if no variable holds it."""
        module_name = self._holders.get(id(value))
        if module_name is None:
            return None
        variables = list(vars(sys.modules[module_name]).items())
        names = (name for name, held in variables if held is value)
        return next((ObjectName((_GLOBALS, module_name), (("attribute", name),)) for name in names), None)

    @cached_property
    def _holders(self) -> dict[int, str]:
        """By the ``id`` of an object, the name of the first module that holds it."""
        holders: dict[int, str] = {}
        for module_name, module in reversed(list(sys.modules.items())):
            if module is not None and not is_of_library(module_name):
                holders.update(dict.fromkeys(map(id, list(vars(module).values())), module_name))
        return holders


def is_of_library(module_name: str) -> bool:
    """Return whether a Python module is of the standard library, torch, DeepSpeed and others that hold no model."""
    return module_name.partition(".")[0] in _LIBRARIES


def _is_of_pipeline(name: str) -> bool:
    """Return whether the attribute holds layers, or is one of every ``nn.Module``, such as its hooks."""
    return name in HOLDS_LAYERS or name.isdigit() or name in MODULE_MACHINERY


def _is_data(value: Any) -> bool:
    return isinstance(value, list | tuple | dict) and len(value) > MOST_ENTRIES
