"""Names of objects that several layers refer to, by which every rank finds its counterpart.

An object that was shared when the model was built has the same path on every rank. The path starts at

- the layer list, for what two of its entries refer to, such as a configuration that several LayerSpecs take;
- the ``PipelineModule``, for its attributes, such as the process grid, and for itself; the engine, for itself;
- a global variable of a Python module, such as the arguments that Megatron's ``get_args()`` returns.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.module import HOLDS_LAYERS, layer_specs
from ds_dynmo.engine.move.object_graph import MODULE_MACHINERY, Path, children, follow, text, walk
from ds_dynmo.engine.run.generators import is_generator, is_generator_class

_LAYER, _PIPELINE, _ENGINE, _GLOBALS = "layer", "pipeline", "engine", "globals"
_TORCH_NEEDS = {"sympy", "mpmath", "networkx"}  # a third of all global variables, and none of a model
_OF_DATA = {"datasets", "huggingface_hub", "pandas", "pyarrow"}  # as many again, where there are rows to read
_LIBRARIES = frozenset(
    {*sys.stdlib_module_names, *_TORCH_NEEDS, *_OF_DATA, "torch", "numpy", "deepspeed", "ds_dynmo"} - {"__main__"}
)
MOST_ENTRIES = 10_000  # larger containers are not searched for names: a loss function may hold a whole data set


@dataclass(frozen=True)
class ObjectName:
    """The path of an object on every rank: an anchor, and the steps from there.

    ``anchor`` is ``("layer", number)``, ``("pipeline", None)``, ``("engine", None)`` or ``("globals", name of a Python
    module)``.
    """

    anchor: tuple[str, Any]
    path: Path

    def __str__(self) -> str:
        kind, key = self.anchor
        anchors = {_LAYER: f"layers[{key}]", _PIPELINE: "the PipelineModule", _ENGINE: "the engine"}
        return anchors.get(kind, str(key)) + text(self.path)


class Names:
    """The names of one rank's objects. Construction is collective.

    Args:
        pipeline: DeepSpeed's module, as built.
        modules: returns the present layers of this rank, by number.
        gather: gathers one picklable value of every stage.
        engine: of this rank.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        modules: Callable[[], Mapping[int, nn.Module]],
        gather: Callable[[Any], list[Any]],
        engine: Any = None,
    ) -> None:
        self._pipeline, self._engine = pipeline, engine
        self._modules = modules
        users = self._users(gather)
        # Both keep the objects alive, so that their ids are not reused.
        self._in_several = {key: part for key, (part, layers) in users.items() if len(layers) > 1}
        self._names = self._find_names({key: min(layers) for key, (_, layers) in users.items() if len(layers) == 1})
        self._names[id(pipeline)] = pipeline, ObjectName((_PIPELINE, None), ())
        if engine is not None:
            self._names[id(engine)] = engine, ObjectName((_ENGINE, None), ())
        self._generators = self._find_generators(gather)
        self._names.update(self._generators)
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

    def generators(self) -> dict[str, Any]:
        """Return the random generators that belong to the rank, by name: those that are there now."""
        present: dict[str, Any] = {}
        for _, name in self._generators.values():
            with suppress(LookupError):
                present[str(name)] = self.find(name)
        return {name: value for name, value in present.items() if is_generator(value)}

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

    def update(self) -> None:
        """Name what is now at the pipeline's paths: a re-packing makes other process groups.

        The groups of the world before would keep its connections and threads.
        """
        for key, (value, name) in list(self._names.items()):
            if name.anchor[0] == _PIPELINE and (present := self._present(name)) is not value:
                del self._names[key]
                if present is not None:
                    self._names.setdefault(id(present), (present, name))

    def _present(self, name: ObjectName) -> Any:
        """Find the object with this name; None: there is none."""
        with suppress(LookupError):
            return self.find(name)
        return None

    def find(self, name: ObjectName) -> Any:
        """Find the object with this name on this rank.

        Raises:
            LookupError: there is no such object.
        """
        kind, key = name.anchor
        if kind == _LAYER:
            return follow(layer_specs(self._pipeline)[key], name.path)
        of_rank = {_PIPELINE: self._pipeline, _ENGINE: self._engine}
        return follow(of_rank[kind] if kind in of_rank else sys.modules.get(key), name.path)

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

    def _find_generators(self, gather: Callable[[Any], list[Any]]) -> dict[int, tuple[Any, ObjectName]]:
        """Map the ``id`` of each random generator that no layer owns to the generator and its name on every rank.

        That is what layers share, what functions of the layer list hold, and what global variables hold.
        """
        found: dict[int, tuple[Any, list[ObjectName]]] = {}
        functions = [
            (((_LAYER, index), path), value)
            for index, spec in enumerate(layer_specs(self._pipeline))
            for path, value in walk(_function_of(spec), lambda _: True)
            if is_generator(value)
        ]
        for (anchor, path), value in (*functions, *_generators_in_globals()):
            found.setdefault(id(value), (value, []))[1].append(ObjectName(anchor, path))
        on_ranks = gather([str(name) for _, names in found.values() for name in names])
        everywhere = set(on_ranks[0]).intersection(*on_ranks)
        named = {key: entry for key, entry in self._names.items() if is_generator(entry[0])}
        for key, (value, names) in found.items():
            common = sorted((name for name in names if str(name) in everywhere), key=str)
            if common:
                named.setdefault(key, (value, common[0]))
        return named


def _function_of(spec: Any) -> list[tuple[Path, Any]]:
    """Return the function of an entry of the layer list, with its path, if it has one."""
    if isinstance(spec, TiedLayerSpec):
        return [((("attribute", "forward_fn"),), spec.forward_fn)]
    return [] if isinstance(spec, nn.Module | LayerSpec) else [((), spec)]


def _generators_in_globals() -> Iterator[tuple[tuple[tuple[str, Any], Path], Any]]:
    """Yield the generators in global variables, and in objects, containers and classes of the program in them."""
    for module_name, module in list(sys.modules.items()):
        if module is None or is_of_library(module_name):
            continue
        is_installed = "site-packages" in (getattr(module, "__file__", None) or "")
        if is_installed and not any(map(is_generator_class, set(map(type, list(vars(module).values()))))):
            continue  # nearly all are, with tens of thousands of variables
        for name, value in list(vars(module).items()):
            path: Path = (("attribute", name),)
            if is_generator(value):
                yield ((_GLOBALS, module_name), path), value
            elif not (is_installed or isinstance(value, nn.Module | types.ModuleType) or _is_data(value)):
                held = vars(value).items() if isinstance(value, type) else ()
                within = [(("attribute", key), item) for key, item in held] or children(value)
                for step, item in within:
                    if is_generator(item):
                        yield ((_GLOBALS, module_name), (*path, step)), item


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
