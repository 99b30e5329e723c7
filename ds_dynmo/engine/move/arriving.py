"""A layer that arrives: its receive buffers, and its module built around them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.move.packing import GradientDtype, expected_gradients
from ds_dynmo.engine.move.references import References
from ds_dynmo.engine.move.shell import Build
from ds_dynmo.engine.move.tensors import TensorMeta, bytes_of, restored, restored_sparse, view_of
from ds_dynmo.engine.state.layer_record import LayerRecord, register_hooks

Complete = Callable[[nn.Module], None]
RecvBufferOf = Callable[[str], torch.Tensor | None]


class ArrivingLayer:
    """A layer that arrives: :meth:`bind`, :meth:`build`, :meth:`allocate`, :meth:`load`, receive, :meth:`materialize`.

    Attributes:
        changed_by_step, changed_any_time: receive buffers of the tensors of :class:`PackedLayer` with these names.
    """

    def __init__(self, header: bytes) -> None:
        self._shell, self._metas, self._references = pickle.loads(header)
        self._counterparts: dict[int, Any] = {}
        self._built: nn.Module | None = None
        self._layer: LayerRecord | None = None
        self._makers: list[Callable[[], torch.Tensor]] = []
        self._data: dict[int, torch.Tensor] = {}
        self._constant_data: list[torch.Tensor] = []
        self.changed_by_step: list[torch.Tensor] = []
        self.changed_any_time: list[torch.Tensor] = []

    @property
    def recv_buffers(self) -> list[torch.Tensor]:
        """All receive buffers, in the order of :attr:`PackedLayer.tensors`."""
        return [*self.changed_by_step, *self.changed_any_time]

    def bind(self, references: References, device: torch.device) -> None:
        """Find the counterparts of the layer's references on this rank. No layer changes.

        Raises:
            LookupError: a counterpart is missing or differs.
        """
        self._counterparts = {n: references.resolve(reference, device) for n, reference in enumerate(self._references)}

    def build(self, build: Build, device: torch.device) -> None:
        """Build a layer that cannot be pickled from its spec, before memory for what arrives is taken.

        Raises:
            Exception: any error of a user's constructor, or a :class:`TypeError`: it lacks modules.
        """
        self._built = self._shell.build(build, device)

    def allocate(self, device: torch.device, buffer_of: RecvBufferOf, sent_ahead: ArrivingLayer | None = None) -> None:
        """Allocate the receive buffers.

        Args:
            buffer_of: returns the flat memory for a parameter by name; None: allocate memory.
            sent_ahead: the layer with the tensors received before. Its buffers are released.
        """
        wanted = {meta.sent_ahead for meta in self._metas if meta.sent_ahead is not None}
        known = sent_ahead._hand_over(wanted) if sent_ahead is not None else {}
        self._makers = [self._maker(number, meta, device, buffer_of, known) for number, meta in enumerate(self._metas)]

    def _hand_over(self, wanted: Container[int]) -> dict[int, torch.Tensor]:
        """Release all buffers, and return the constant tensors ``wanted``, by number."""
        known = {number: data for number, data in enumerate(self._constant_data) if number in wanted}
        self._free()
        return known

    def _free(self) -> None:
        self._layer, self._makers, self._data, self._constant_data = None, [], {}, []
        self.changed_by_step, self.changed_any_time = [], []

    def _maker(
        self,
        number: int,
        meta: TensorMeta,
        device: torch.device,
        buffer_of: RecvBufferOf,
        known: Mapping[int, torch.Tensor],
    ) -> Callable[[], torch.Tensor]:
        if (base := meta.base) is not None:
            return lambda: restored(meta, view_of(self._data[base], meta))
        if meta.strides is None:
            parts = [self._recv_buffer(part, device, buffer_of) for part in meta.parts]
            return lambda: restored(meta, restored_sparse(meta, parts))
        if meta.sent_ahead is not None:
            data = known[meta.sent_ahead]
        else:
            data = self._recv_buffer(meta, device, buffer_of)
        self._data[number] = data
        if meta.constant:
            self._constant_data.append(data)
        return lambda: restored(meta, data)

    def _recv_buffer(self, meta: TensorMeta, device: torch.device, buffer_of: RecvBufferOf) -> torch.Tensor:
        memory = buffer_of(meta.name) if meta.name is not None and meta.is_contiguous else None
        if memory is not None and memory.dtype == meta.dtype:
            data = memory.view(meta.shape)
        else:
            assert meta.strides is not None, "sparse tensors come in parts"
            where = torch.device("cpu") if meta.on_cpu else device
            data = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=where)
        if data.numel():
            (self.changed_by_step if meta.constant else self.changed_any_time).append(bytes_of(data))
        return data

    def load(self, device: torch.device, complete: Complete = lambda module: None) -> None:
        """Build the layer around its buffers, which are not filled yet. No other layer changes.

        Args:
            complete: the user's callbacks for a layer that arrives.

        Raises:
            Exception: any error of a user's object, or a :class:`TypeError`: the layer is not what was sent.
        """
        tensors = [make() for make in self._makers]
        layer = self._shell.load(tensors, self._counterparts, self._built, device)
        self._built = None
        complete(layer.module)
        self._shell.check(layer, tensors, self._counterparts)
        self._layer = layer

    def expect_gradients(self, gradient_dtype: GradientDtype) -> list[torch.Tensor]:
        """Allocate the gradients of :meth:`PackedLayer.values_left`.

        Returns:
            The receive buffers of all that it lists.
        """
        layer = self._layer
        assert layer is not None, "load comes first"
        buffers = []
        trained = {meta.name for meta in self._metas if meta.name is not None and meta.requires_grad}
        for name, (parameter, dtype) in expected_gradients(layer, trained, gradient_dtype).items():
            gradient = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
            layer.parameters[name].gradient = gradient
            buffers.append(bytes_of(gradient))
        return [*self.changed_any_time, *buffers]

    def materialize(self) -> LayerRecord:
        """Complete the built layer, once its buffers are filled, with what belongs to its parameters."""
        layer = self._layer
        assert layer is not None, "load comes first"
        for record in layer.parameters.values():
            vars(record.parameter).update(record.attributes)
            register_hooks(record.parameter, record.hooks)
        self._free()
        return layer
