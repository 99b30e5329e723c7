"""Parameters that several layers have though they are not tied: each stage would train a copy of its own.

Layers given as modules are on every rank, and so are the arguments of LayerSpecs. Of these, and of global variables,
only the rank that has built a layer knows whether they are parameters of it. So each rank says which memory its layers
use, by a name that every rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.ties import uses_by_key
from ds_dynmo.engine.move.names import GlobalVariables
from ds_dynmo.engine.move.object_graph import text, walk
from ds_dynmo.errors import ConfigError, noted
from ds_dynmo.unmarked import unmarked


@dataclass(frozen=True)
class Extent:
    """A piece of memory.

    Attributes:
        space: what ``begin`` and ``end`` count bytes of: this process, or an object that every rank has.
        layer: that has it as a parameter; None: it is in an argument of a LayerSpec, or in a global variable.
        name: of the parameter, or of the argument.
    """

    space: str
    begin: int
    end: int
    layer: int | None
    name: str


def parameter_extents(specs: Sequence[Any], built: Mapping[int, nn.Module]) -> list[Extent]:
    """List the parameters of layers in memory that every rank has under a name.

    Args:
        specs: the layer list of the model, before DeepSpeed has moved it to its device and converted it.
        built: this rank's layers, by number.

    Raises:
        ConfigError: two layers that are here share a parameter.
    """
    first_use = {use: uses[0] for uses in uses_by_key(specs).values() for use in uses}
    given = {index: spec for index, spec in enumerate(specs) if isinstance(spec, nn.Module)}
    held = [
        _extent(parameter, first_use.get(index, index), name)
        for index, layer in {**given, **built}.items()
        for name, parameter in layer.named_parameters()
    ]
    check_not_shared(held)
    named = [_extent(tensor, None, name) for name, tensor in chain(_arguments(specs), _globals({**given, **built}))]
    found = []
    for one, other in _overlaps([*held, *named]):
        for parameter, tensor in ((one, other), (other, one)):
            if parameter.layer is not None and tensor.layer is None:
                begin, end = parameter.begin - tensor.begin, parameter.end - tensor.begin
                found.append(Extent(tensor.name, begin, end, parameter.layer, parameter.name))
    return found


def check_not_shared(extents: Iterable[Extent]) -> None:
    """Refuse parameters of several layers.

    Raises:
        ConfigError: naming the layers.
    """
    shared = [(one, other) for one, other in _overlaps({*extents}) if one.layer != other.layer]
    if shared:
        layers = sorted({extent.layer for pair in shared for extent in pair if extent.layer is not None})
        first = sorted((extent.layer or 0, extent.name) for extent in shared[0])
        named = " is ".join(f"{name} of layer {layer}" for layer, name in first)
        raise ConfigError(
            f"layers {layers} share parameters with one another ({named}): they could not be on different stages; make "
            "them TiedLayerSpecs of one key"
        )


def _extent(tensor: torch.Tensor, layer: int | None, name: str) -> Extent:
    """Describe where a tensor lies in this process; one without memory of its own counts as one byte."""
    with noted(name if layer is None else f"{name} of layer {layer}"):
        data = unmarked(tensor)
        begin = data.data_ptr() if data.layout == torch.strided and data.numel() else 0
        if not begin:
            return Extent("object", id(tensor), id(tensor) + 1, layer, name)
        last = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride()))
        return Extent(str(data.device), begin, begin + (last + 1) * data.element_size(), layer, name)


def _overlaps(extents: Iterable[Extent]) -> Iterator[tuple[Extent, Extent]]:
    open_ones: list[Extent] = []
    for extent in sorted(extents, key=lambda extent: (extent.space, extent.begin, extent.name, extent.layer or 0)):
        open_ones = [one for one in open_ones if one.space == extent.space and one.end > extent.begin]
        yield from ((one, extent) for one in open_ones)
        open_ones.append(extent)


def _arguments(specs: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Find the tensors in arguments of LayerSpecs, by a name that is the same on every rank."""
    roots = [((("item", index),), spec) for index, spec in enumerate(specs) if isinstance(spec, LayerSpec)]
    for path, value in walk(roots, lambda _: True):
        if isinstance(value, torch.Tensor):
            yield f"layers{text(path)}", value


def _globals(layers: Mapping[int, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Find the parameters of layers that are global variables of a Python module, or in a module that is one."""
    variables = GlobalVariables()
    for layer in layers.values():
        for part in layer.modules():
            if (place := variables.of(part)) is not None:
                yield from ((f"{place}.{name}", parameter) for name, parameter in part.named_parameters())
        for parameter in layer.parameters():
            if (place := variables.of(parameter)) is not None:
                yield str(place), parameter
