"""What stays on a rank must not use parts of layers that leave it: these parts would be empty."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_dynmo.engine.move.code_reads import reads_of
from ds_dynmo.engine.move.description import kind_of, path_text
from ds_dynmo.engine.move.layer_tensors import TensorsByMemory, named_tensors, registered
from ds_dynmo.engine.move.names import Names
from ds_dynmo.engine.move.object_graph import Path

_PASS_OR_TIE = "pass what both need to each as an argument of its LayerSpec, or tie the two (TiedLayerSpec)"
WalkLayer = Callable[[nn.Module, Callable[[Any], bool]], Iterator[tuple[Path, Any]]]


@dataclass(frozen=True)
class Reader:
    """A function that stays on a rank and may use layers.

    Attributes:
        name, remedy: for messages.
        of_closure: whether only its closure and global variables count, not what the object holds whose method it is.
    """

    name: str
    function: Callable[..., Any]
    remedy: str
    of_closure: bool = False


class _Part(NamedTuple):
    layer: nn.Module
    text: str


class _Parts:
    """The modules and tensors that layers own."""

    def __init__(self, layers: Mapping[int, nn.Module], names: Names) -> None:
        self._parts: dict[int, _Part] = {}
        tensors: list[torch.Tensor] = []
        for number, layer in layers.items():
            for path, module in layer.named_modules():
                if not names.is_of_one_layer(module):
                    continue
                self._parts[id(module)] = _Part(layer, f"{path} of layer {number}" if path else f"layer {number}")
                for name, tensor in named_tensors(path, module):
                    if isinstance(tensor, nn.Parameter) or not names.is_shared(tensor):  # other shared ones stay
                        self._parts[id(tensor)] = _Part(layer, f"{name} of layer {number}")
                        tensors.append(tensor)
        self._memory = TensorsByMemory(tensors)

    def find(self, value: Any) -> _Part | None:
        """Return which part ``value`` is, or lies in; None: in none."""
        part = self._parts.get(id(value))
        if part is None and isinstance(value, torch.Tensor):
            part = self._parts.get(id(self._memory.find(value)))
        return part


class LeftBehind:
    """Refuses moves after which something on this rank would use layers that have left.

    Args:
        names: of what layers share.
        modules: returns the present layers of this rank, by number.
        walk: visits the objects that a layer refers to.
    """

    def __init__(self, names: Names, modules: Callable[[], Mapping[int, nn.Module]], walk: WalkLayer) -> None:
        self._names, self._modules, self._walk = names, modules, walk

    def check(self, leaving: Collection[nn.Module], readers: Iterable[Reader] = ()) -> None:
        """Refuse to send layers of which layers that stay, or other functions, use parts.

        Args:
            readers: functions that stay.

        Raises:
            TypeError: with the path of the attribute or variable that refers to such a part.
        """
        if not leaving:
            return
        layers, gone = self._modules(), set(map(id, leaving))
        parts = _Parts(layers, self._names)

        def leaves(value: Any) -> _Part | None:
            part = parts.find(value)
            return part if part is not None and id(part.layer) in gone else None

        for number, layer in layers.items():
            if id(layer) in gone:
                continue
            own = {id(tensor) for module in layer.modules() for tensor in registered(module).values()}
            for path, value in self._walk(layer, lambda value: not leaves(value) and not self._names.is_shared(value)):
                part = leaves(value) if id(value) not in own else None
                if part is not None:
                    raise TypeError(
                        f"layer {number} stays and its {path_text(path)} is {part.text}, which leaves: {_PASS_OR_TIE}"
                    )
        _check_code(layers, parts, gone)
        for reader in readers:
            _check_reader(reader, leaves)


def _check_code(layers: Mapping[int, nn.Module], parts: _Parts, gone: Set[int]) -> None:
    """Refuse to move layers whose code uses parts of others by global variables, and these others."""
    for number, layer in layers.items():
        seen: set[type] = set()  # of this layer: what the same code reads may be a part of another layer's
        for module in layer.modules():
            if type(module) in seen or not isinstance(module.forward, types.MethodType):
                continue
            seen.add(type(module))
            for read in reads_of(module):
                part = parts.find(read.value)
                if part is not None and part.layer is not layer and {id(layer), id(part.layer)} & gone:
                    raise TypeError(
                        f"{kind_of(module)}.forward of layer {number} uses {read.path}, which is {part.text}, and "
                        f"would not find it after the move: {_PASS_OR_TIE}"
                    )


def _check_reader(reader: Reader, leaves: Callable[[Any], _Part | None]) -> None:
    for read in reads_of(reader.function):
        value = read.value
        held = (*value.modules(), *value.parameters()) if isinstance(value, nn.Module) else (value,)
        part = next((part for each in held if (part := leaves(each)) is not None), None)
        if part is not None and not (reader.of_closure and read.of_owner):
            raise TypeError(f"{reader.name} uses {read.path}, which is {part.text}, which leaves: {reader.remedy}")
