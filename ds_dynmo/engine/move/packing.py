"""Packing of a layer in its present state into a header of bytes and flat byte tensors.

The layer's module is pickled with its tensors taken out. So attributes, masks, extra state, buffers (non-persistent
ones too) and parameters of any shape arrive as they left, nothing is initialised, and no random number is drawn.
Optimizer state, gradients, hooks and parameter groups are in the same pickle. Objects that the layer refers to but does
not own travel as names (:mod:`ds_dynmo.engine.move.references`).

Weights and moments are *constant* between two steps of the optimizer and may travel while a batch trains. Buffers,
attributes, step counts and gradients may change meanwhile. If only values have changed, they follow at the commit
(:meth:`PackedLayer.values_left`). Else the layer is packed again, in its state then.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.move.object_graph import is_constant
from ds_dynmo.engine.move.pickling import dump
from ds_dynmo.engine.move.references import Outside, References
from ds_dynmo.engine.move.shell import Shell
from ds_dynmo.engine.move.tensors import TensorMeta, bytes_of, describe, find_bases, meta_of
from ds_dynmo.engine.run.compiled_layers import check_not_compiled
from ds_dynmo.engine.state.layer_record import LayerRecord, without_gradients
from ds_dynmo.torch_private import version_of
from ds_dynmo.unmarked import unmarked

GradientDtype = Callable[[nn.Parameter], torch.dtype | None]


@dataclass(frozen=True)
class _Constant:
    """A constant tensor, with version and address to detect changes."""

    tensor: torch.Tensor
    version: int
    address: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Constant:
        return cls(tensor, version_of(tensor), unmarked(tensor).data_ptr())

    def is_unchanged(self) -> bool:
        return (version_of(self.tensor), unmarked(self.tensor).data_ptr()) == (self.version, self.address)


@dataclass(frozen=True)
class PackedLayer:
    """A layer ready to be sent.

    Attributes:
        header: for :class:`ArrivingLayer`; refers to tensors by number.
        shell, listed, outside: what the header was made of.
    """

    header: bytes
    shell: Shell
    listed: _Listed
    outside: Outside

    @property
    def changed_by_step(self) -> tuple[torch.Tensor, ...]:
        """Flat byte views of the tensors that only the optimizer's step changes."""
        return self.listed.changed_by_step

    @property
    def changed_any_time(self) -> tuple[torch.Tensor, ...]:
        """Flat byte views of the other tensors; parts of sparse tensors one by one."""
        return self.listed.changed_any_time

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors to send, in the order of :attr:`ArrivingLayer.recv_buffers`."""
        return (*self.changed_by_step, *self.changed_any_time)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)

    def values_left(
        self, layer: LayerRecord, references: References | None, gradient_dtype: GradientDtype
    ) -> list[torch.Tensor] | None:
        """List what is to be sent after a batch, as flat byte views, if nothing but values has changed.

        These are :attr:`changed_any_time`, and the gradients of the parameters that train.

        Args:
            layer: as it is now.
            references: as for :func:`pack`.
            gradient_dtype: returns the type of a parameter's gradient; None: it is not in the layer.

        Returns:
            None: the layer has to be packed again.
        """
        outside = self.outside
        holds_tensors = any(reference.tensors for reference in outside.references.values())
        if self.shell.dismantled_paths or outside.rank_attributes or holds_tensors:
            return None
        trained = {name for name, record in layer.parameters.items() if record.parameter.requires_grad}
        expected = expected_gradients(layer, trained, gradient_dtype)
        gradients = {name: record.gradient for name, record in layer.parameters.items() if record.gradient is not None}
        if gradients.keys() != expected.keys() or not all(
            _is_as(gradients[name], *expected[name]) for name in expected
        ):
            return None
        try:
            check_not_compiled(layer.module)
            if _outside(layer, references) != outside:
                return None
            dumped = dump(without_gradients(layer), {key: number for number, key in enumerate(outside.references)})
        except Exception:  # any error of a user's object, which packing again finds too
            return None
        if dumped.data != self.shell.data or not all(constant.is_unchanged() for constant in self.listed.constants):
            return None
        listed = _Listed.of(layer, dumped.tensors)
        if not listed.is_like(self.listed):
            return None
        return [*listed.changed_any_time, *(bytes_of(gradient) for gradient in gradients.values())]


@dataclass(frozen=True)
class _Listed:
    """The tensors of a layer, with what the receiver has to know of each, and their memory as flat byte views."""

    tensors: tuple[torch.Tensor, ...]
    metas: tuple[TensorMeta, ...]
    changed_by_step: tuple[torch.Tensor, ...]
    changed_any_time: tuple[torch.Tensor, ...]
    constants: tuple[_Constant, ...]  # that travel

    @classmethod
    def of(
        cls, layer: LayerRecord, tensors: Sequence[torch.Tensor], ahead: Mapping[int, int] = MappingProxyType({})
    ) -> _Listed:
        """List the tensors of a layer.

        Args:
            ahead: by ``id``, the number of each constant tensor that was sent ahead.
        """
        name_of = {id(record.parameter): name for name, record in layer.parameters.items()}
        constant, bases = _constant_tensors(layer), find_bases(tensors)
        metas: list[TensorMeta] = []
        changed_by_step: list[torch.Tensor] = []
        changed_any_time: list[torch.Tensor] = []
        for number, tensor in enumerate(tensors):
            name = name_of.get(id(tensor))
            if number in bases:
                base, offset = bases[number]
                meta = meta_of(tensor, name=name, base=base, offset=offset)
            elif id(tensor) in ahead:
                meta = meta_of(tensor, name=name, sent_ahead=ahead[id(tensor)])
            else:
                meta, flat = describe(tensor, name=name, constant=id(tensor) in constant)
                (changed_by_step if meta.constant else changed_any_time).extend(flat)
            metas.append(meta)
        constants = tuple(_Constant.of(tensor) for tensor, meta in zip(tensors, metas) if meta.constant)
        return cls(tuple(tensors), tuple(metas), tuple(changed_by_step), tuple(changed_any_time), constants)

    def is_like(self, other: _Listed) -> bool:
        """Return whether these are the same tensors, of the same kinds."""
        same = len(self.tensors) == len(other.tensors) and all(map(is_, self.tensors, other.tensors))
        return same and self.metas == other.metas


def expected_gradients(
    layer: LayerRecord, trained: Container[str], gradient_dtype: GradientDtype
) -> dict[str, tuple[nn.Parameter, torch.dtype]]:
    """List the parameters that have a gradient in the layer at the end of a batch, with its type, by name.

    Args:
        trained: names of the parameters that require gradients.
    """
    return {
        name: (record.parameter, dtype)
        for name, record in layer.parameters.items()
        if (dtype := gradient_dtype(record.parameter)) is not None and record.group is not None and name in trained
    }


def _is_as(gradient: torch.Tensor, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Return whether a gradient is one block of memory with an element for each of the parameter."""
    same = gradient.layout == torch.strided and (gradient.dtype, gradient.numel()) == (dtype, parameter.numel())
    return same and gradient.is_contiguous()


def pack(
    layer: LayerRecord,
    references: References | None = None,
    sent_ahead: PackedLayer | None = None,
    *,
    completed: bool = False,
) -> PackedLayer:
    """Pack ``layer`` into a header and tensors, which are views of the layer's memory where possible.

    Args:
        references: of layers to objects that they do not own; None: the layer owns all of its objects.
        sent_ahead: the layer as it was packed when its constant tensors were sent; changed ones are sent again.
        completed: whether a user's callback completes the layer on arrival.

    Raises:
        TypeError: a part of the layer can neither be sent nor be built by the receiver, the layer refers to an object
            of another layer that has no name, or the user has compiled a part in place.
    """
    check_not_compiled(layer.module)
    outside = _outside(layer, references)
    shell, tensors = Shell.of(layer, outside, completed)
    known = sent_ahead.listed.constants if sent_ahead is not None else ()
    ahead = {id(constant.tensor): number for number, constant in enumerate(known) if constant.is_unchanged()}
    listed = _Listed.of(layer, tensors, ahead)
    header = pickle.dumps((shell, listed.metas, tuple(outside.references.values())))
    return PackedLayer(header, shell, listed, outside)


def _outside(layer: LayerRecord, references: References | None) -> Outside:
    return references.outside(layer.module, _extra_roots(layer)) if references is not None else Outside()


def _constant_tensors(layer: LayerRecord) -> set[int]:
    """Return the ``id`` of weights and of optimizer state per element, except sparse ones, which have no version."""
    parameters = layer.parameters.values()
    state = [value for record in parameters for value in (record.state or {}).values()]
    moments = [value for value in state if isinstance(value, torch.Tensor) and value.ndim]
    tensors = (*(record.parameter for record in parameters), *moments)
    return {id(tensor) for tensor in tensors if tensor.layout == torch.strided and not unmarked(tensor).is_inference()}


def _extra_roots(layer: LayerRecord) -> dict[str, Any]:
    """Collect the users' attributes and hooks of the layer's parameters, which may refer to any object, by name."""
    roots: dict[str, Any] = {}
    for name, record in layer.parameters.items():
        attributes = {name: value for name, value in record.attributes.items() if not is_constant(value)}
        hooks = {method: each for method, each in record.hooks.items() if each}
        roots |= {f"{name}.{kind}": held for kind, held in (("marks", attributes), ("hooks", hooks)) if held}
    return roots
