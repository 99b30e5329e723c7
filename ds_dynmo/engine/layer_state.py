"""A layer as what it is now, in a form that travels: a header of bytes and flat byte tensors.

The layer's module is pickled with its tensors taken out, so that attributes, masks, extra state, buffers
(non-persistent ones too) and parameters of any present shape arrive as they left, nothing is initialised and
no random number drawn. Optimizer state, gradients and parameter groups go the same way, in the same pickle.
A module that cannot be pickled (a lambda in an attribute, a hook that is a closure) is taken apart instead
and put into a shell that the receiver builds from the layer's spec.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_dynmo.engine.wrappers import bound_by_wrapper

_MODULE_MACHINERY = frozenset(vars(nn.Module()))


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
        group_options: options of the groups above, as they are now.
    """

    module: Any
    parameters: list[nn.Parameter]
    groups: list[int | None]
    optimizer_state: list[dict[Any, Any] | None]
    gradients: list[torch.Tensor | None]
    attributes: list[dict[str, Any]]
    group_options: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Dismantled:
    """A module that cannot be pickled: per submodule path, its parameters, buffers and those attributes that can."""

    parameters: dict[str, dict[str, nn.Parameter | None]]
    buffers: dict[str, dict[str, torch.Tensor | None]]
    non_persistent: dict[str, set[str]]
    attributes: dict[str, dict[str, bytes]]
    training: dict[str, bool]
    extra_state: dict[str, Any]


@dataclass(frozen=True)
class TensorMeta:
    """How to make room for a tensor that arrives, and what it is."""

    is_parameter: bool
    requires_grad: bool
    on_cpu: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None  # None: a sparse tensor, which travels as its parts
    layout: torch.layout = torch.strided
    is_coalesced: bool = False
    parts: tuple[TensorMeta, ...] = ()


@dataclass(frozen=True)
class PackedLayer:
    """A layer ready to be sent: ``shell`` refers to ``tensors`` by number."""

    shell: bytes
    metas: tuple[TensorMeta, ...]
    tensors: tuple[torch.Tensor, ...]  # flat byte views, parts of sparse tensors one by one

    @property
    def header(self) -> bytes:
        return pickle.dumps((self.shell, self.metas))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)


# -- packing ------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles anything; tensors are collected, each object once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._number: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._number:
            self._number[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._number[id(obj)]


def pack(content: LayerContent) -> PackedLayer:
    """``content`` as a header and tensors; the tensors are views of the layer's own memory where they can be."""
    try:
        shell, tensors = _pickled(content)
    except (pickle.PicklingError, AttributeError, TypeError):
        content = LayerContent(**{**vars(content), "module": _dismantle(content.module)})
        shell, tensors = _pickled(content)
    metas, flat = [], []
    for tensor in tensors:
        meta, parts = _describe(tensor)
        metas.append(meta)
        flat.extend(parts)
    return PackedLayer(shell, tuple(metas), tuple(flat))


def _pickled(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def _describe(tensor: torch.Tensor) -> tuple[TensorMeta, list[torch.Tensor]]:
    is_parameter, requires_grad = isinstance(tensor, nn.Parameter), tensor.requires_grad and tensor.is_leaf
    data, on_cpu = tensor.detach(), tensor.device.type == "cpu"
    shape = tuple(data.shape)
    if data.layout != torch.strided:
        parts = [_describe(part) for part in dense_parts(data)]
        metas = tuple(meta for meta, _ in parts)
        coalesced = data.layout == torch.sparse_coo and data.is_coalesced()
        meta = TensorMeta(is_parameter, requires_grad, on_cpu, shape, data.dtype, None, data.layout, coalesced, metas)
        return meta, [flat for _, flats in parts for flat in flats]
    if not _is_dense(data):
        data = data.contiguous()
    meta = TensorMeta(is_parameter, requires_grad, on_cpu, shape, data.dtype, data.stride())
    return meta, ([_bytes_of(data)] if data.numel() else [])


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


def _dismantle(module: nn.Module) -> Dismantled:
    parts = Dismantled({}, {}, {}, {}, {}, {})
    for path, sub in module.named_modules():
        parts.parameters[path] = dict(sub._parameters)
        parts.buffers[path] = dict(sub._buffers)
        parts.non_persistent[path] = set(sub._non_persistent_buffers_set)
        parts.training[path] = sub.training
        parts.attributes[path] = {}
        for name, value in vars(sub).items():
            if name not in _MODULE_MACHINERY:
                try:
                    parts.attributes[path][name] = pickle.dumps(value)
                except (pickle.PicklingError, AttributeError, TypeError):
                    continue  # the shell built from the spec keeps its own
        if type(sub).get_extra_state is not nn.Module.get_extra_state:
            parts.extra_state[path] = sub.get_extra_state()
    return parts


# -- unpacking ----------------------------------------------------------------------------------------


class ArrivingLayer:
    """A layer on its way: :meth:`furnish` makes room, :attr:`landing` is received into, :meth:`open` gives it."""

    def __init__(self, header: bytes) -> None:
        self._shell, self._metas = pickle.loads(header)
        self._tensors: list[Callable[[], torch.Tensor]] = []
        self.landing: list[torch.Tensor] = []

    def furnish(self, device: torch.device) -> None:
        """Allocate the layer's tensors."""
        self._tensors = [self._room(meta, device) for meta in self._metas]

    def _room(self, meta: TensorMeta, device: torch.device) -> Callable[[], torch.Tensor]:
        place = torch.device("cpu") if meta.on_cpu else device
        if meta.strides is None:
            rooms = [self._room(part, device) for part in meta.parts]
            return lambda: _as(meta, _sparse(meta, [room() for room in rooms]))
        data = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=place)
        if data.numel():
            self.landing.append(_bytes_of(data))
        return lambda: _as(meta, data)

    def open(self, shell: Callable[[], nn.Module]) -> LayerContent:
        """The layer, once :attr:`landing` is filled. ``shell`` builds an unpicklable layer's module from its spec."""
        unpickler = _Unpickler(io.BytesIO(self._shell), [make() for make in self._tensors])
        content: LayerContent = unpickler.load()
        if isinstance(content.module, Dismantled):
            with random_state_kept():
                module = shell()
            content.module = _assemble(module, content.module)
        for parameter, gradient, attributes in zip(content.parameters, content.gradients, content.attributes):
            parameter.grad = gradient
            vars(parameter).update(attributes)
        return content


class _Unpickler(pickle.Unpickler):
    """Loads what :class:`_Pickler` wrote on another rank of the same job."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


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


def _assemble(module: nn.Module, parts: Dismantled) -> nn.Module:
    for path, sub in module.named_modules():
        if path not in parts.parameters:
            continue
        for name, value in parts.attributes[path].items():
            setattr(sub, name, pickle.loads(value))
        sub._parameters.clear()
        sub._parameters.update(parts.parameters[path])
        sub._buffers.clear()
        sub._buffers.update(parts.buffers[path])
        sub._non_persistent_buffers_set = parts.non_persistent[path]
        sub.training = parts.training[path]
        if path in parts.extra_state:
            sub.set_extra_state(parts.extra_state[path])
    return module


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever is drawn inside leaves every random number generator as it was."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def parameter_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """What was set on a parameter and can travel (bound methods and hooks stay behind)."""
    attributes = {}
    for name, value in vars(parameter).items():
        if bound_by_wrapper(name):
            continue
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError):
            continue
        attributes[name] = value
    return attributes
