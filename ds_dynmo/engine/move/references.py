"""References of a layer to objects that it does not own. After a move it refers to the counterparts of the new rank.

A layer owns the modules, parameters and buffers that are registered in it and in no other layer, and all other objects
that only it refers to. These move. Of an object that was shared when the model was built, only the name travels
(:mod:`ds_dynmo.engine.move.names`).

Two cases are refused before bytes move, with the attribute's path: an object that layers share without a name, which
would become one copy per layer, and a tensor of another layer. To avoid a refusal, users declare that attributes belong
to the rank (``rank_attributes`` in the "dynmo" section, or in a module's class). An arriving layer then has the values
that it gets when it is built on that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_dynmo.engine.deepspeed.module import layer_specs
from ds_dynmo.engine.move.description import can_be_sent, checksum, kind_of, path_text
from ds_dynmo.engine.move.functions import ListFunctions
from ds_dynmo.engine.move.layer_tensors import TensorsByMemory, named_tensors, registered
from ds_dynmo.engine.move.left_behind import LeftBehind
from ds_dynmo.engine.move.memory import check_arrays, check_tensor
from ds_dynmo.engine.move.names import GlobalVariables, Names, ObjectName
from ds_dynmo.engine.move.object_graph import Path, Step, children, is_immutable, members, walk
from ds_dynmo.engine.move.pickling import pickles_with
from ds_dynmo.engine.run.generators import is_generator
from ds_dynmo.torch_private import buffers_of, children_of, parameters_of

_OF_ANOTHER = (
    "{} is {}: a layer does not take another's weights along; refer to the layer by an argument of the LayerSpecs, or "
    "tie the two (TiedLayerSpec)"
)
RANK_ATTRIBUTES = "rank_attributes"  # of a module's class: names of its attributes that belong to the rank


@dataclass(frozen=True)
class Reference:
    """An object that a layer refers to by name.

    Attributes:
        where: path of the layer's attribute that refers to it, for messages.
        kind: type of the object; that of the counterpart must be the same.
        tensors: for a tensor, or a module that the layer computes with: name, dtype, shape and checksum of each tensor
            in it; those of the counterpart must be equal.
    """

    name: ObjectName
    where: str
    kind: str
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...] = ()


@dataclass
class Outside:
    """The objects that a layer refers to and that do not travel with it.

    Attributes:
        references: by ``id``, the objects that are found by name on arrival.
        rank_attributes: by ``id`` of a module, its attributes that belong to the rank.
    """

    references: dict[int, Reference] = field(default_factory=dict)
    rank_attributes: dict[int, frozenset[str]] = field(default_factory=dict)


@dataclass
class _Walks:
    """What walks have found: global variables, and by number of a layer its objects, by ``id``."""

    variables: GlobalVariables = field(default_factory=GlobalVariables)
    objects: dict[int, dict[int, Any]] = field(default_factory=dict)


class References:
    """Separates what the layers of one rank own from what they only refer to. Construction is collective.

    Args:
        pipeline: DeepSpeed's module, as built.
        modules: returns the present layers of this rank, by number.
        gather: gathers one picklable value of every stage.
        rank_attributes: names of attributes that belong to the rank, in every module of every layer.
        engine: of this rank, to which a layer may refer.

    Attributes:
        functions: of the layer list.
        left_behind: refuses moves of layers that something on this rank uses.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        modules: Callable[[], Mapping[int, nn.Module]],
        gather: Callable[[Any], list[Any]],
        rank_attributes: Iterable[str] = (),
        engine: Any = None,
    ) -> None:
        self._modules = modules
        self._names = Names(pipeline, modules, gather, engine)
        self._rank_attributes = frozenset(rank_attributes)
        self._walks: _Walks | None = None
        self.functions = ListFunctions(layer_specs(pipeline), pipeline.tied_modules)
        self.left_behind = LeftBehind(self._names, modules, self._walk)

    def is_shared(self, value: Any) -> bool:
        """Return whether ``value`` has a name, and so belongs to the rank rather than to a layer."""
        return self._names.is_shared(value)

    def update(self) -> None:
        """Name what the ``PipelineModule`` and its grid hold now, after a re-packing."""
        self._names.update()

    def shared_generators(self) -> dict[str, Any]:
        """Find the random generators that belong to the rank rather than to a layer, by name."""
        return self._names.generators()

    def free_memory(self, layer: nn.Module) -> None:
        """Free the memory of a layer that left, except for modules that other layers use too."""
        for part in layer.modules():
            if self._names.is_of_one_layer(part):
                tables: tuple[dict[str, Any], ...] = (parameters_of(part), buffers_of(part))
                for held in tables:
                    held.update({name: _without_memory(t) for name, t in held.items() if t is not None})

    # -- a layer that leaves --------------------------------------------------------------------------

    @contextmanager
    def walked_once(self) -> Iterator[None]:
        """Walk each layer once for all calls of :meth:`outside` within. No object may change meanwhile."""
        self._walks = _Walks()
        try:
            yield
        finally:
            self._walks = None

    def outside(self, layer: nn.Module, extra_roots: Mapping[str, Any]) -> Outside:
        """Find the objects that ``layer`` refers to and that do not move with it.

        Args:
            extra_roots: other objects that travel with the layer and may refer to any object, by a name for messages.

        Raises:
            TypeError: it refers to an object that it shares with another layer and that has no name, to a tensor of
                another layer, or to a tensor without values. The message has the attribute's path.
        """
        outside, walks, others = Outside(), self._walks or _Walks(), self._others(layer)
        own_modules = {id(part): part for part in layer.modules() if self._names.is_of_one_layer(part)}
        own_tensors = {id(t) for part in own_modules.values() for t in registered(part).values()}
        nameless: dict[int, tuple[Path, Any]] = {}

        def enter(value: Any) -> bool:
            return id(value) not in outside.references

        roots: list[tuple[Path, Any]] = [
            ((), layer),
            *(((("attribute", name),), held) for name, held in extra_roots.items()),
        ]
        for path, value in _walk_layer(roots, enter, self._rank_attributes_of, outside):
            if id(value) in own_tensors or id(value) in own_modules:
                if isinstance(value, torch.Tensor):
                    check_tensor(path, value)
                continue
            if (part := self._names.given_part(value)) is not None:
                raise TypeError(_OF_ANOTHER.format(path_text(path), part))
            name = self._names.of(value)
            if name is None and not is_immutable(value):
                name = walks.variables.of(value)
                if name is not None and is_generator(value):
                    raise TypeError(
                        f"{path_text(path)} is {name}, a random generator that was made after initialize: make it "
                        "before, so that its numbers belong to layers as those of torch's own generators do, or give "
                        "the layer a generator of its own"
                    )
            if name is not None:
                if isinstance(value, nn.Parameter | nn.Module):
                    self._check_not_of_others(path, value, others)
                outside.references[id(value)] = self._reference(name, path, value, layer)
            elif not is_immutable(value):
                nameless[id(value)] = (path, value)
        self._check_nameless(nameless, layer, roots, outside, walks)
        return outside

    def _others(self, layer: nn.Module) -> dict[int, nn.Module]:
        return {number: module for number, module in self._modules().items() if module is not layer}

    def _walk(self, layer: nn.Module, enter: Callable[[Any], bool]) -> Iterator[tuple[Path, Any]]:
        return _walk_layer([((), layer)], enter, self._rank_attributes_of, Outside())

    def _rank_attributes_of(self, module: nn.Module) -> frozenset[str]:
        declared = self._rank_attributes.union(getattr(type(module), RANK_ATTRIBUTES, ()))
        return frozenset(name for name in declared if name in vars(module))

    def _check_not_of_others(self, path: Path, value: Any, others: Mapping[int, nn.Module]) -> None:
        """Refuse a tensor of another layer or a view of one, and a module that another layer owns."""
        for number, other in others.items():
            if isinstance(value, torch.Tensor):
                theirs = {id(tensor): name for name, tensor in (*other.named_parameters(), *other.named_buffers())}
                whole = TensorsByMemory((*other.parameters(), *other.buffers())).find(value)
                name = theirs.get(id(value), theirs.get(id(whole)))
                if name is not None:
                    raise TypeError(_OF_ANOTHER.format(path_text(path), f"{name} of layer {number}"))
            elif any(value is part for part in other.modules()) and self._names.is_of_one_layer(value):
                raise TypeError(_OF_ANOTHER.format(path_text(path), f"a part of layer {number}"))

    def _check_nameless(
        self,
        nameless: dict[int, tuple[Path, Any]],
        layer: nn.Module,
        roots: Sequence[tuple[Path, Any]],
        outside: Outside,
        walks: _Walks,
    ) -> None:
        """Refuse objects without a name that another layer refers to as well."""
        others = self._others(layer) if nameless else {}
        for path, value in nameless.values():
            if isinstance(value, torch.Tensor):
                check_tensor(path, value)
                self._check_not_of_others(path, value, others)
        own = [*layer.parameters(), *layer.buffers(), *(v for _, v in nameless.values() if isinstance(v, torch.Tensor))]
        check_arrays(nameless.values(), own, lambda value: _travels(value, layer, roots, outside))
        for number, other in others.items():
            if number not in walks.objects:
                found = walk([((), other)], lambda value: not self._names.is_shared(value), children=_all_of)
                walks.objects[number] = {id(value): value for _, value in found}
            for key, value in walks.objects[number].items():
                if key in nameless and _travels(value, layer, roots, outside):
                    path, shared = nameless[key]
                    if isinstance(shared, nn.Module):
                        self._check_not_of_others(path, shared, others)
                    raise TypeError(self._shared_text(layer, path, shared, number))

    def _shared_text(self, layer: nn.Module, path: Path, shared: Any, other: int) -> str:
        """Build the message that ``layer`` shares an object without a name with layer ``other``."""
        number = next(number for number, module in self._modules().items() if module is layer)
        text = (
            f"layer {number}'s {path_text(path)}, a {kind_of(shared)}, is shared with layer {other} and would become a "
            "copy: make it an argument of their LayerSpecs, an attribute of the PipelineModule or a global variable of "
            "a Python module"
        )
        attribute = _attribute_in(layer, path)
        if attribute is None:  # not an attribute of a module
            return text
        return f'{text}, or say that it belongs to the rank: "rank_attributes": ["{attribute}"] in the "dynmo" section'

    def _reference(self, name: ObjectName, path: Path, value: Any, layer: nn.Module) -> Reference:
        tensors: dict[str, torch.Tensor] = {}
        if isinstance(value, torch.Tensor):
            tensors = {"": value}
        elif isinstance(value, nn.Module) and any(part is value for part in layer.modules()):
            tensors = {n: t for part, module in value.named_modules() for n, t in named_tensors(part, module)}
            parameter = next((n for n, t in tensors.items() if isinstance(t, nn.Parameter)), None)
            if parameter is not None:
                raise TypeError(
                    f"{path_text((*path, ('attribute', parameter)))} is a parameter of several layers: make them "
                    "TiedLayerSpecs of one key"
                )
        return Reference(
            name,
            path_text(path),
            kind_of(value),
            tuple((n, t.dtype, tuple(t.shape), checksum(t)) for n, t in tensors.items()),
        )

    # -- a layer that arrives -------------------------------------------------------------------------

    def resolve(self, reference: Reference, device: torch.device) -> Any:
        """Find the counterpart of an object on this rank.

        Args:
            device: of modules that layers compute with.

        Raises:
            LookupError: there is no counterpart, or its type or its tensors differ.
        """
        name = reference.name
        try:
            value = self._names.find(name)
        except LookupError as error:
            raise LookupError(f"{reference.where} refers to {name}, which this rank does not have: {error}") from error
        if kind_of(value) != reference.kind:
            raise LookupError(
                f"{reference.where} refers to {name}, a {reference.kind} where the layer was, and a {kind_of(value)} "
                "here"
            )
        for part, dtype, shape, values in reference.tensors:
            here = _counterpart(value, part, dtype, device)
            if here is None or (here.dtype, tuple(here.shape), checksum(here)) != (dtype, shape, values):
                raise LookupError(
                    f"{reference.where} refers to {name}{'.' * bool(part)}{part}, which holds other values here than "
                    "where the layer was: register it as a buffer of each layer, or build it alike on every rank"
                )
        return value


def _walk_layer(
    roots: Sequence[tuple[Path, Any]],
    enter: Callable[[Any], bool],
    rank_attributes: Callable[[nn.Module], frozenset[str]],
    outside: Outside,
) -> Iterator[tuple[Path, Any]]:
    """Walk like :func:`walk`, but skip attributes that belong to the rank and record them in ``outside``."""

    def refers_to(value: Any) -> Iterator[tuple[Step, Any]]:
        if not isinstance(value, nn.Module):
            yield from _all_of(value)
            return
        of_rank = rank_attributes(value)
        if of_rank:
            outside.rank_attributes[id(value)] = of_rank
        yield from (entry for entry in children(value) if entry[0][1] not in of_rank)

    yield from walk(roots, enter, children=refers_to)


def _travels(value: Any, layer: nn.Module, roots: Sequence[tuple[Path, Any]], outside: Outside) -> bool:
    """Return whether ``value`` is sent when ``layer`` moves.

    An attribute that cannot be pickled, such as a process group, stays behind with all that it holds. The layer gets a
    new one when it is built at the destination.
    """
    known = {*outside.references, *map(id, layer.modules())}
    attributes = [held for _, held in roots[1:]]
    for part in layer.modules():
        of_rank = outside.rank_attributes.get(id(part), ())
        attributes += [held for name, held in vars(part).items() if name not in of_rank]
    return any(pickles_with(held, value, known) and can_be_sent(held, known) for held in attributes)


def _all_of(value: Any) -> Iterator[tuple[Step, Any]]:
    """Yield every object that ``value`` refers to directly."""
    yield from children(value)
    yield from members(value)


def _attribute_in(layer: nn.Module, path: Path) -> str | None:
    """Return the attribute of a module by which ``path`` leaves the modules of ``layer``; None: there is none."""
    module = layer
    for _, key in path:
        child = children_of(module).get(key)
        if child is None:
            return key if key in vars(module) else None
        module = child
    return None


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _counterpart(value: Any, part: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Find the tensor named ``part`` of ``value``, and convert it to the layer's device and dtype.

    If no layer of this rank has computed with a module, DeepSpeed has not converted it.
    """
    if not part:
        return value if isinstance(value, torch.Tensor) else None
    path, _, leaf = part.rpartition(".")
    try:
        module = value.get_submodule(path)
    except AttributeError:
        return None
    held: dict[str, torch.Tensor | None] = buffers_of(module)
    tensor = held.get(leaf)
    if tensor is not None and (tensor.dtype != dtype or tensor.device.type != device.type):
        held[leaf] = tensor.to(device, dtype)
    return held.get(leaf)
