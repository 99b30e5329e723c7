"""Functions of the layer list, which every rank has and which do not travel: what they hold has to stay as it is.

A function may be any callable that is no ``nn.Module``, such as a lambda, a bound method or an object with
``__call__``. ``forward_fn`` of a TiedLayerSpec is one, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.move.code_reads import Read, reads_of
from ds_dynmo.engine.move.description import kind_of, tensor_text, text_of_constant
from ds_dynmo.engine.move.object_graph import is_constant
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import version_of

Held = frozenset[tuple[str, str]]  # paths and texts of what a function reads
Changes = Mapping[tuple[int, int], Held]  # of functions since the engine was built, by pipeline and layer
_LARGE_BYTES = 16 << 20  # of larger tensors, changes are counted instead of compared


def functions_of(specs: Sequence[Any]) -> Iterator[tuple[int, Callable[..., Any]]]:
    """Yield the functions of a layer list with their layers."""
    for index, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            if spec.forward_fn is not None:
                yield index, spec.forward_fn
        elif not isinstance(spec, nn.Module | LayerSpec):
            yield index, spec


def check_functions(specs: Sequence[Any], tied: nn.ModuleDict) -> None:
    """Refuse functions that use weights, or tensors of an object: these would be each rank's own.

    Args:
        tied: the PipelineModule's ``tied_modules``.

    Raises:
        ConfigError: naming the layer, and what it uses.
    """
    owners = {
        id(held): f"{name} of layer {index}" if name else f"layer {index}"
        for index, spec in enumerate(specs)
        if isinstance(spec, nn.Module)
        for name, held in (*spec.named_modules(), *spec.named_parameters(), *spec.named_buffers())
    }
    for index, function in functions_of(specs):
        for read in _reads(specs, index, function, tied):
            what = owners.get(id(read.value)) or _state_text(read)
            if what is not None:
                raise ConfigError(
                    f"layers[{index}] ({_name(function)}) is no nn.Module and uses {read.path}, which is "
                    f"{what}: when layers move, a function stays on every rank with what it holds there. Make it an "
                    "nn.Module with parameters and buffers of its own; if another layer has them too, make both "
                    "TiedLayerSpecs of one key, with a forward_fn that uses its first argument"
                )


class ListFunctions:
    """The functions of a layer list, and what each read when the engine was built.

    Args:
        tied: the PipelineModule's ``tied_modules``.
    """

    def __init__(self, specs: Sequence[Any], tied: nn.ModuleDict) -> None:
        self._specs, self._tied = specs, tied
        self._functions = dict(functions_of(specs))
        self._at_first = {index: self._held(index) for index in self._functions}

    def changes(self, layers: Iterable[int], pipeline: int) -> Changes:
        """Return what functions of layers read that is other than when the engine was built."""
        here = [layer for layer in layers if layer in self._functions]
        changed = {(pipeline, layer): self._held(layer) - self._at_first[layer] for layer in here}
        return {key: held for key, held in changed.items() if held}

    def _held(self, index: int) -> Held:
        reads = _reads(self._specs, index, self._functions[index], self._tied)
        return frozenset((read.path, _text(read.value)) for read in reads)


def check_same(changes: Sequence[Changes]) -> None:
    """Refuse functions that are not the same on the two ranks between which a layer moves.

    Args:
        changes: of each rank.

    Raises:
        TypeError: naming the layer, and what differs.
    """
    of_ranks: dict[tuple[int, int], list[Held]] = {}
    for key, held in (entry for of_rank in changes for entry in of_rank.items()):
        of_ranks.setdefault(key, []).append(held)
    for (_, layer), helds in of_ranks.items():
        differing = helds[0] ^ helds[1] if len(helds) == 2 else helds[0]
        if differing:
            raise TypeError(
                f"layers[{layer}] is no nn.Module and reads {min(differing)[0]}, which changed in training where the "
                "layer is, and not in the same way where it would move to: make it an nn.Module, whose attributes and "
                "buffers move with it"
            )


def _reads(specs: Sequence[Any], index: int, function: Callable[..., Any], tied: nn.ModuleDict) -> Iterator[Read]:
    """Find what a function reads, except for the module of its own key in ``tied``: the rank's own use of it.

    GPT-NeoX's ``forward_fn`` reads ``self.tied_modules.embed``, where ``self`` is the PipelineModule.
    """
    own: set[int] = set()
    spec = specs[index]
    if isinstance(spec, TiedLayerSpec):
        if spec.key in tied:
            module = tied[spec.key]
            own.update(map(id, (*module.modules(), *module.parameters(), *module.buffers())))
        if spec.key not in tied or len({other.key for other in specs if isinstance(other, TiedLayerSpec)}) == 1:
            own.add(id(tied))  # there is no use here; or no other key for a subscript
    yield from (read for read in reads_of(function) if id(read.value) not in own)


def _state_text(read: Read) -> str | None:
    value = read.value
    if isinstance(value, nn.Module) and any(True for _ in (*value.parameters(), *value.buffers())):
        return f"a {kind_of(value)} with weights"
    if isinstance(value, nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad):
        return "a tensor that trains"
    if read.of_owner and isinstance(value, torch.Tensor | numpy.ndarray):
        return f"a {kind_of(value)} of the object"
    return None


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        large = value.nbytes > _LARGE_BYTES
        return f"{tuple(value.shape)}, changed {version_of(value)} times" if large else tensor_text(value)
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject and value.nbytes <= _LARGE_BYTES:
        return f"{value.dtype}, {value.shape}, {zlib.crc32(value.tobytes()):08x}"
    return text_of_constant(value) if is_constant(value) else kind_of(value)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", kind_of(function)))
