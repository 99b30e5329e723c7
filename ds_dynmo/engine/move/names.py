"""Name objects that several layers refer to, so that every rank finds its own.

An object that was shared when the model was built has the same path on every rank. The path begins at

- the layer list, for what two of its entries refer to, such as a configuration that several LayerSpecs take;
- the ``PipelineModule``, for its attributes, such as the process grid;
- the globals of a Python module, such as the arguments that Megatron's ``get_args()`` returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed_adapter.module import HOLDS_LAYERS, layer_specs
from ds_dynmo.engine.move.object_graph import MODULE_MACHINERY, Path, children, follow, text, walk

_LAYER, _PIPELINE, _GLOBALS = "layer", "pipeline", "globals"
_NO_GLOBALS_OF_A_MODEL = frozenset({*sys.stdlib_module_names, "torch", "numpy", "deepspeed", "ds_dynmo"} - {"__main__"})
_GLOBALS_DEPTH = 3
_MOST_ENTRIES = 10_000  # larger containers are not searched for names: a loss function may hold a whole data set


@dataclass(frozen=True)
class Name:
    """Where an object is on every rank: an anchor, and the steps from there.

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
        modules: returns the layers that this rank has now, by number.
        gather: returns one picklable value of every rank.
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
        self._held_deep: dict[str, dict[int, tuple[Any, Path]]] | None = None  # by Python module, then by id
        # Both keep the objects alive, so that their ids are not reused.
        self._in_several = {key: part for key, (part, layers) in users.items() if len(layers) > 1}
        self._names = self._find_names({key: min(layers) for key, (_, layers) in users.items() if len(layers) == 1})

    def of(self, value: Any) -> Name | None:
        """Find the name of ``value`` in the layer list or the ``PipelineModule``, or None if it has no name."""
        entry = self._names.get(id(value))
        return entry[1] if entry is not None else None

    def is_shared(self, value: Any) -> bool:
        """Tell whether ``value`` has a name, so that it belongs to the rank rather than to a layer."""
        return id(value) in self._names

    def is_own(self, part: nn.Module) -> bool:
        """Tell whether ``part``, which is registered in a layer, is registered in no other."""
        return id(part) not in self._in_several

    def find(self, name: Name) -> Any:
        """Find the object with this name on this rank.

        Raises:
            LookupError: there is none.
        """
        kind, key = name.anchor
        if kind == _LAYER:
            start = layer_specs(self._pipeline)[key]
        else:
            start = self._pipeline if kind == _PIPELINE else sys.modules.get(key)
        return follow(start, name.path)

    def _users(self, gather: Callable[[Any], list[Any]]) -> dict[int, tuple[nn.Module, set[int]]]:
        """Map the ``id`` of each module that layers register to those layers. Tied layers count as the first of them.

        Layers given as modules are on every rank. For modules among the arguments of LayerSpecs, only a rank that has
        built a layer knows which of them the layer registers, so the ranks tell each other.
        """
        users: dict[int, tuple[nn.Module, set[int]]] = {}
        first_use = self._first_uses()
        given = {i: spec for i, spec in enumerate(layer_specs(self._pipeline)) if isinstance(spec, nn.Module)}
        for layer, module in {**given, **self._modules()}.items():
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
        """Find, per layer, the first layer with the same tie key: the layer itself if it has none."""
        first: dict[str | int, int] = {}
        specs = layer_specs(self._pipeline)
        keys = [str(spec.key) if isinstance(spec, TiedLayerSpec) else layer for layer, spec in enumerate(specs)]
        return [first.setdefault(key, layer) for layer, key in enumerate(keys)]

    def _find_names(self, owner: Mapping[int, int]) -> dict[int, tuple[Any, Name]]:
        """Map the ``id`` of each shared object to the object and its name.

        Args:
            owner: by ``id`` of a module, the only layer that registers it.
        """
        found: dict[int, tuple[Any, Name]] = {}
        users: dict[int, int] = {}
        for layer, spec in enumerate(layer_specs(self._pipeline)):

            def enter(value: Any, layer: int = layer) -> bool:
                """Do not enter what another layer owns, nor an object on its third visit: it is known to be shared."""
                return owner.get(id(value), layer) == layer and users[id(value)] <= 2

            for path, value in walk([((), spec)], enter):
                found.setdefault(id(value), (value, Name((_LAYER, layer), path)))
                users[id(value)] = users.get(id(value), 0) + 1
        names = {key: found[key] for key, count in users.items() if count > 1}
        attributes = [((step,), value) for step, value in children(self._pipeline) if not _is_of_pipeline(step[1])]
        for path, value in walk(attributes, lambda value: id(value) not in owner and not _is_data(value)):
            names.setdefault(id(value), (value, Name((_PIPELINE, None), path)))
        return {
            k: entry for k, entry in names.items() if k not in owner and not isinstance(entry[0], tuple | frozenset)
        }

    @contextmanager
    def globals_kept(self) -> Iterator[None]:
        """Search the globals of each Python module once, for all layers that are packed meanwhile."""
        self._held_deep = {}
        try:
            yield
        finally:
            self._held_deep = None

    def in_globals(self, wanted: Mapping[int, Any], layer: nn.Module) -> dict[int, Name]:
        """Name those of the objects ``wanted`` that are in the globals of a Python module.

        The globals of every module count, except for Python's own, torch's, numpy's and DeepSpeed's. In the program and
        in the packages of the layer's classes, what the globals hold counts too, ``_GLOBALS_DEPTH`` steps deep, and so
        does what their classes hold, such as the one instance of a singleton.
        """
        packages = {type(part).__module__.partition(".")[0] for part in layer.modules()} | {"__main__"}
        found: dict[int, Name] = {}
        for module_name, module in list(sys.modules.items()):
            package = module_name.partition(".")[0]
            if package in _NO_GLOBALS_OF_A_MODEL or module is None:
                continue
            if package in packages:
                held = self._deep(module_name, module)
                for key in wanted.keys() & held.keys():
                    found.setdefault(key, Name((_GLOBALS, module_name), held[key][1]))
                continue
            globals_of_module = dict(vars(module))
            if wanted.keys().isdisjoint(map(id, globals_of_module.values())):
                continue  # a usual program has 50,000 globals, too many to walk for each layer that leaves
            for name, value in globals_of_module.items():
                if id(value) in wanted:
                    found.setdefault(id(value), Name((_GLOBALS, module_name), _step_to(name)))
        return found

    def _deep(self, module_name: str, module: Any) -> dict[int, tuple[Any, Path]]:
        """Find what the globals of a Python module hold, with paths, by ``id``."""
        if self._held_deep is not None and module_name in self._held_deep:
            return self._held_deep[module_name]
        held = [(_step_to(name), value) for name, value in dict(vars(module)).items() if _is_of(value, module_name)]
        classes = [(path, value) for path, value in held if isinstance(value, type)]
        held += [((*path, *_step_to(name)), value) for path, kind in classes for name, value in _class_attributes(kind)]
        found = {id(value): (value, path) for path, value in walk(held, _is_holder, _GLOBALS_DEPTH)}
        if self._held_deep is not None:
            self._held_deep[module_name] = found
        return found


def _step_to(name: str) -> Path:
    return (("attribute", name),)


def _class_attributes(kind: type) -> list[tuple[str, Any]]:
    """List what a class holds for all its instances, without its methods and other descriptors."""
    return [(name, value) for name, value in vars(kind).items() if not hasattr(type(value), "__get__")]


def _is_of_pipeline(name: str) -> bool:
    """Tell whether the attribute holds layers, or is one that every ``nn.Module`` has, such as its hooks."""
    return name in HOLDS_LAYERS or name.isdigit() or name in MODULE_MACHINERY


def _is_data(value: Any) -> bool:
    return isinstance(value, list | tuple | dict) and len(value) > _MOST_ENTRIES


def _is_of(value: Any, module_name: str) -> bool:
    """Tell whether a module defines ``value``: False for a class that it imports from elsewhere."""
    return getattr(value, "__module__", module_name) == module_name if isinstance(value, type) else True


def _is_holder(value: Any) -> bool:
    return not isinstance(value, nn.Module | LayerSpec | torch.Tensor)
