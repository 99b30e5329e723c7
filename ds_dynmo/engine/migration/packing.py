"""A layer as what it is now, in a form that travels: a header of bytes and flat byte tensors.

The layer's module is pickled with its tensors taken out, so that attributes, masks, extra state, buffers
(non-persistent ones too) and parameters of any present shape arrive as they left, nothing is initialised and
no random number drawn. Optimizer state, gradients, hooks and parameter groups go the same way, in the same pickle.
What the layer refers to and does not own goes as a name (:mod:`ds_dynmo.engine.migration.references`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.deepspeed_adapter.optimizer_wrappers import bound_by_wrapper
from ds_dynmo.engine.migration.references import Outside, References
from ds_dynmo.engine.serialization.pickling import (
    NOT_PICKLABLE,
    Dismantled,
    assemble,
    can_be_pickled,
    dismantle,
    dump,
    load,
    missing_in,
    random_state_kept,
)

_HOOKS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}  # torch's methods, and where it keeps what they register (private, read in torch 2.13.0)


@dataclass
class LayerContent:
    """What a layer consists of.

    Attributes:
        module: the layer, or its :class:`Dismantled` parts, or None for a plain function.
        parameters: the layer's parameters, each once.
        groups: per parameter, its index among the optimizer's parameter groups; None if it is in none.
        optimizer_state: per parameter, the optimizer's state for it; None if it has none.
        gradients: per parameter, a gradient that is held; usually None at a batch boundary.
        attributes: per parameter, what was set on it (``ds_pipe_replicated``, a user's own marks).
        hooks: per parameter, the user's hooks on it, by the method that registers them.
        group_options: options of the groups above, as they are now.
    """

    module: Any
    parameters: list[nn.Parameter]
    groups: list[int | None]
    optimizer_state: list[dict[Any, Any] | None]
    gradients: list[torch.Tensor | None]
    attributes: list[dict[str, Any]]
    hooks: list[dict[str, list[Any]]]
    group_options: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorMeta:
    """How to make room for a tensor that arrives, and what it is.

    Attributes:
        strides: None for a sparse tensor, which travels as its dense ``parts``.
        position: among the layer's parameters, if it is one of them.
        base, offset: the number of the tensor in whose memory it lies, and where, in elements: it does not travel.
    """

    is_parameter: bool
    requires_grad: bool
    on_cpu: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None
    layout: torch.layout = torch.strided
    is_coalesced: bool = False
    parts: tuple[TensorMeta, ...] = ()
    position: int | None = None
    base: int | None = None
    offset: int = 0

    @property
    def is_contiguous(self) -> bool:
        return self.strides == torch.empty(self.shape, device="meta").stride()


@dataclass(frozen=True)
class PackedLayer:
    """A layer ready to be sent: ``header``, for :class:`ArrivingLayer`, refers to ``tensors`` by number."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]  # flat byte views, parts of sparse tensors one by one

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)


# -- packing ------------------------------------------------------------------------------------------


def pack(content: LayerContent, build: Callable[[], nn.Module], names: References | None = None) -> PackedLayer:
    """``content`` as a header and tensors; the tensors are views of the layer's own memory where they can be.

    Args:
        build: makes the layer anew from its spec, as the receiver will where the module cannot be pickled.
        names: of what the layer refers to and does not own; None: everything in it is its own.

    Raises:
        TypeError: a part of the layer can neither be pickled nor be built by the receiver, or it refers to something of
            another layer's that has no name.
    """
    outside = names.outside(content.module, _marks(content)) if names is not None else Outside()
    numbers = {key: number for number, key in enumerate(outside.references)}
    try:
        if outside.rank_attributes:
            raise TypeError("attributes that belong to the rank do not travel")
        shell, tensors = dump(content, numbers)
    except NOT_PICKLABLE:
        parts = dismantle(content.module, numbers, outside.rank_attributes)
        with random_state_kept():
            missing = missing_in(build(), parts)
        if missing:
            raise TypeError(
                f"{type(content.module).__name__} has submodules {missing} that cannot be pickled and that its spec "
                "does not build"
            ) from None
        shell, tensors = dump(replace(content, module=parts), numbers)
    position = {id(parameter): number for number, parameter in enumerate(content.parameters)}
    bases = _bases(tensors)
    metas, flat = [], []
    for number, tensor in enumerate(tensors):
        if number in bases:
            base = bases[number]
            offset = (tensor.data_ptr() - tensors[base].data_ptr()) // tensor.element_size()
            meta = replace(_meta(tensor), base=base, offset=offset)
        else:
            meta, tensors_of_it = _describe(tensor)
            flat.extend(tensors_of_it)
        metas.append(replace(meta, position=position.get(id(tensor))))
    return PackedLayer(pickle.dumps((shell, tuple(metas), tuple(outside.references.values()))), tuple(flat))


def _marks(content: LayerContent) -> dict[str, Any]:
    """What users set on the layer's parameters, by the parameters' names."""
    names = {id(parameter): name for name, parameter in content.module.named_parameters()}
    found = zip(content.parameters, content.attributes, content.hooks)
    return {
        f"{names[id(p)]}.{kind}": held for p, *both in found for kind, held in zip(("marks", "hooks"), both) if held
    }


def _describe(tensor: torch.Tensor) -> tuple[TensorMeta, list[torch.Tensor]]:
    data = tensor.detach()
    if data.layout != torch.strided:
        parts = [_describe(part) for part in dense_parts(data)]
        meta = replace(_meta(tensor), parts=tuple(meta for meta, _ in parts))
        return meta, [flat for _, flats in parts for flat in flats]
    if not _is_dense(data):
        data = data.contiguous()
    return replace(_meta(tensor), strides=data.stride()), ([_bytes_of(data)] if data.numel() else [])


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(
        is_parameter=isinstance(tensor, nn.Parameter),
        requires_grad=tensor.requires_grad and tensor.is_leaf,
        on_cpu=tensor.device.type == "cpu",
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        strides=tensor.stride() if tensor.layout == torch.strided else None,
        layout=tensor.layout,
        is_coalesced=tensor.layout == torch.sparse_coo and tensor.is_coalesced(),
    )


def _bases(tensors: list[torch.Tensor]) -> dict[int, int]:
    """By number, the tensor in whose memory each lies that lies in another's: a view stays one."""
    found: dict[int, int] = {}
    strided = [n for n, tensor in enumerate(tensors) if tensor.layout == torch.strided and tensor.numel()]
    order = sorted(strided, key=lambda n: (str(tensors[n].device), tensors[n].data_ptr(), -_span(tensors[n]), n))
    base: int | None = None
    for number in order:
        tensor = tensors[number]
        if base is not None and _lies_in(tensor, tensors[base]):
            found[number] = base
        elif _is_dense(tensor):
            base = number
    return found


def _lies_in(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    end = base.data_ptr() + _span(base)
    inside = base.data_ptr() <= tensor.data_ptr() and tensor.data_ptr() + _span(tensor) <= end
    return inside and tensor.device == base.device and tensor.dtype == base.dtype


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    return (sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that hold what a tensor holds: itself, or the parts of a sparse CSR or COO tensor."""
    data = tensor.detach()
    if data.layout == torch.strided:
        return (data,)
    if data.layout == torch.sparse_csr:
        return data.crow_indices(), data.col_indices(), data.values()
    if data.layout == torch.sparse_coo:
        return data._indices(), data._values()  # as they are: coalescing would change the order of later sums
    raise TypeError(f"a tensor of layout {data.layout} cannot be sent")


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's memory (torch's ``nbytes`` knows no sparse one)."""
    return sum(part.nbytes for part in dense_parts(tensor))


def _is_dense(tensor: torch.Tensor) -> bool:
    """No gaps and no overlap: a permutation of a contiguous tensor."""
    strides, shape = tensor.stride(), tensor.shape
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], -shape[axis]))
    return tensor.permute(order).is_contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


# -- unpacking ----------------------------------------------------------------------------------------

RecvBufferOf = Callable[[int], torch.Tensor | None]


class ArrivingLayer:
    """A layer on its way: :meth:`allocate`, receive into :attr:`recv_buffers`, :meth:`materialize`."""

    def __init__(self, header: bytes) -> None:
        self._shell, self._metas, self._references = pickle.loads(header)
        self._counterparts: list[Any] = []
        self._makers: list[Callable[[], torch.Tensor]] = []
        self._data: dict[int, torch.Tensor] = {}
        self.recv_buffers: list[torch.Tensor] = []

    def bind(self, names: References, device: torch.device) -> None:
        """Find what the layer refers to on this rank. Changes no layer.

        Raises:
            LookupError: something is not here, or is something else.
        """
        self._counterparts = [names.resolve(reference, device) for reference in self._references]

    def allocate(self, device: torch.device, place: RecvBufferOf) -> None:
        """Make room for the layer's tensors.

        Args:
            place: by position, the flat memory in which a parameter is to lie; None: memory of its own.
        """
        self._makers = [self._maker(number, meta, device, place) for number, meta in enumerate(self._metas)]

    def _maker(
        self, number: int, meta: TensorMeta, device: torch.device, place: RecvBufferOf
    ) -> Callable[[], torch.Tensor]:
        if meta.base is not None:
            return lambda: _as(meta, self._view(meta))
        if meta.strides is None:
            parts = [self._recv_buffer(part, device, place) for part in meta.parts]
            return lambda: _as(meta, _sparse(meta, parts))
        data = self._data[number] = self._recv_buffer(meta, device, place)
        return lambda: _as(meta, data)

    def _recv_buffer(self, meta: TensorMeta, device: torch.device, place: RecvBufferOf) -> torch.Tensor:
        given = place(meta.position) if meta.position is not None and meta.is_contiguous else None
        if given is not None and given.dtype == meta.dtype:
            data = given.view(meta.shape)
        else:
            assert meta.strides is not None, "sparse tensors come in parts"
            where = torch.device("cpu") if meta.on_cpu else device
            data = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=where)
        if data.numel():
            self.recv_buffers.append(_bytes_of(data))
        return data

    def _view(self, meta: TensorMeta) -> torch.Tensor:
        assert meta.base is not None and meta.strides is not None
        base = self._data[meta.base]
        return base.as_strided(meta.shape, meta.strides, base.storage_offset() + meta.offset)

    def materialize(self, build: Callable[[], nn.Module]) -> LayerContent:
        """The layer, once :attr:`recv_buffers` are filled; ``build`` makes an unpicklable one from its spec."""
        content: LayerContent = load(self._shell, [make() for make in self._makers], self._counterparts)
        if isinstance(content.module, Dismantled):
            with random_state_kept():
                shell = build()
            content.module = assemble(shell, content.module)
        for parameter, gradient, attributes, hooks in zip(
            content.parameters, content.gradients, content.attributes, content.hooks
        ):
            parameter.grad = gradient
            vars(parameter).update(attributes)
            _register(parameter, hooks)
        return content


def _as(meta: TensorMeta, data: torch.Tensor) -> torch.Tensor:
    if meta.is_parameter:
        return nn.Parameter(data, requires_grad=meta.requires_grad)
    return data.requires_grad_() if meta.requires_grad else data


def _sparse(meta: TensorMeta, parts: list[torch.Tensor]) -> torch.Tensor:
    if meta.layout == torch.sparse_csr:
        crow, col, values = parts
        return torch.sparse_csr_tensor(crow, col, values, meta.shape, dtype=meta.dtype)
    indices, values = parts
    return torch.sparse_coo_tensor(indices, values, meta.shape, is_coalesced=meta.is_coalesced)


# -- what belongs to a parameter ----------------------------------------------------------------------


def parameter_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """What was set on a parameter and can travel."""
    return {
        name: value for name, value in vars(parameter).items() if not bound_by_wrapper(name) and can_be_pickled(value)
    }


def parameter_hooks(parameter: nn.Parameter) -> dict[str, list[Any]]:
    """The user's hooks on a parameter, by the method that registers them; DeepSpeed makes its own anew.

    Raises:
        TypeError: a hook cannot be pickled: it would be lost.
    """
    found = {
        method: [hook for hook in (getattr(parameter, held) or {}).values() if not _is_deepspeeds(hook)]
        for method, held in _HOOKS.items()
    }
    for hook in (hook for hooks in found.values() for hook in hooks):
        if not can_be_pickled(hook):
            raise TypeError(
                f"a parameter of shape {list(parameter.shape)} has the hook {hook!r}, which cannot be pickled and "
                "would be lost: use a function of a Python module, or a method of the layer"
            )
    return found


def _is_deepspeeds(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")


def _register(parameter: nn.Parameter, hooks: dict[str, list[Any]]) -> None:
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook on a frozen one, but keeps those that were there
    for method, functions in hooks.items():
        for function in functions:
            getattr(parameter, method)(function)
    parameter.requires_grad_(trains)
