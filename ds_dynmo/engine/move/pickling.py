"""Pickling of any object between the ranks of one job, without its tensors."""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_dynmo.engine.move.object_graph import place_in_class
from ds_dynmo.torch_private import OpOverload, OpOverloadPacket
from ds_dynmo.unmarked import unmarked

_NO_REFERENCES: Mapping[int, int] = {}
_Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def _reduce_method(method: types.MethodType) -> _Reduced:
    """Reduce a bound method to its owner and its function: the class may have another one under this name."""
    if isinstance(method.__self__, type):
        return getattr, (method.__self__, method.__func__.__name__)
    place = place_in_class(method)
    if place is None:
        return _method, (method.__self__, method.__func__)
    return _method_of_class, (method.__self__, *place)


def _method(owner: Any, function: Callable[..., Any]) -> types.MethodType:
    return types.MethodType(function, owner)  # pickle would not find it by name


def _method_of_class(owner: Any, kind: type, name: str) -> types.MethodType:
    return types.MethodType(vars(kind)[name], owner)


def _reduce_limits(limits: torch.finfo | torch.iinfo) -> _Reduced:
    return type(limits), (getattr(torch, limits.dtype),)


def _reduce_generator(generator: torch.Generator) -> _Reduced:
    """Reduce a generator to bytes: torch's tensor would have no values yet when a layer is loaded."""
    return _generator, (generator.device.type, generator.get_state().numpy().tobytes())


def _generator(device: str, state: bytes) -> torch.Generator:
    return torch.Generator(device).set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _reduce_device(device: torch.device) -> _Reduced:
    """Reduce a device; the sender's own accelerator becomes that of the rank where it is loaded."""
    if device.type != "cpu" and device.index == _own_index():
        return _own_device, (device.type,)
    return torch.device, (str(device),)


def _own_device(kind: str) -> torch.device:
    return torch.device(kind, _own_index())


def _own_index() -> int:
    return int(get_accelerator().current_device())


def _reduce_operator(op: OpOverload | OpOverloadPacket) -> _Reduced:
    return _operator, (str(op),)


def _operator(name: str) -> Any:
    return operator.attrgetter(name)(torch.ops)


_DISPATCH_TABLE: ChainMap[type, Any] = ChainMap(
    {
        types.MethodType: _reduce_method,
        torch.Generator: _reduce_generator,
        torch.device: _reduce_device,
        torch.finfo: _reduce_limits,
        torch.iinfo: _reduce_limits,
        OpOverload: _reduce_operator,
        OpOverloadPacket: _reduce_operator,
    },
    copyreg.dispatch_table,
)


class _Pickler(pickle.Pickler):
    """Pickles any object; collects each tensor once, and writes references as numbers."""

    dispatch_table = _DISPATCH_TABLE

    def __init__(self, file: io.BytesIO, references: Mapping[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.referred: dict[int, Any] = {}
        self._number: dict[int, int] = {}
        self._references = references

    def persistent_id(self, obj: Any) -> int | None:
        if id(obj) in self._references:
            number = self._references[id(obj)]
            self.referred[number] = obj
            return -1 - number
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._number:
            self._number[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._number[id(obj)]


class _Seeker(_Pickler):
    """Pickles any object, and records whether it contains ``sought``."""

    found = False

    def __init__(self, sought: Any, references: Mapping[int, int]) -> None:
        super().__init__(io.BytesIO(), references)
        self._sought = sought

    def persistent_id(self, obj: Any) -> int | None:
        self.found = self.found or obj is self._sought
        return super().persistent_id(obj)


class _Unpickler(pickle.Unpickler):
    """Loads what :class:`_Pickler` wrote on another rank of the same job."""

    def __init__(
        self, file: io.BytesIO, tensors: Sequence[torch.Tensor], references: Sequence[Any] | Mapping[int, Any]
    ) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._references = references

    def persistent_load(self, pid: int) -> Any:
        return self._tensors[pid] if pid >= 0 else self._references[-1 - pid]


@dataclass(frozen=True)
class Dumped:
    """An object as bytes.

    Attributes:
        data: the pickle, with tensors and references by number.
        tensors: of the object, each once.
        referred: the object's references, by number.
    """

    data: bytes
    tensors: list[torch.Tensor]
    referred: dict[int, Any]


def dump(value: Any, references: Mapping[int, int] = _NO_REFERENCES) -> Dumped:
    """Pickle ``value`` to bytes, without its tensors.

    Args:
        references: by ``id``, the number of each object that is not pickled, because the receiver has a counterpart.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, references)
    pickler.dump(value)
    return Dumped(file.getvalue(), pickler.tensors, pickler.referred)


def pickles_with(value: Any, sought: Any, references: Iterable[int]) -> bool:
    """Return whether a pickle of ``value`` contains a copy of ``sought``.

    Args:
        references: the ``id`` of each object that is not pickled.

    Returns:
        False if ``value`` cannot be pickled.
    """
    seeker = _Seeker(sought, dict.fromkeys(references, 0))
    try:
        seeker.dump(value)
    except Exception:  # whatever a user's object raises
        return False
    return seeker.found


def load(data: bytes, tensors: Sequence[torch.Tensor], references: Sequence[Any] | Mapping[int, Any] = ()) -> Any:
    """Load dumped data with these tensors and references."""
    return _Unpickler(io.BytesIO(data), tensors, references).load()


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like the one that arrives for ``tensor`` on another rank, without values and memory."""
    data = unmarked(tensor)
    if data.layout == torch.strided:
        data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad and tensor.is_leaf)
