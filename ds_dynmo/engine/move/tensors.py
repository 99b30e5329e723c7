"""Tensors as they travel: flat bytes, and a description by which the receiver allocates the same tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_dynmo.torch_private import parts_of_sparse
from ds_dynmo.unmarked import unmarked


@dataclass(frozen=True)
class TensorMeta:
    """The description of a tensor by which a receiver allocates it.

    Attributes:
        strides: None for a sparse tensor, which travels as its dense ``parts``.
        name: in the layer, if it is a parameter of the layer.
        constant: whether only the optimizer's step changes it.
        sent_ahead: number among the constant tensors that were sent before; it does not travel again.
        base, offset: for a view, the number of the tensor in whose memory it lies, and the offset in bytes; it does
            not travel.
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
    name: str | None = None
    constant: bool = False
    sent_ahead: int | None = None
    base: int | None = None
    offset: int = 0

    @property
    def is_contiguous(self) -> bool:
        return self.strides == torch.empty(self.shape, device="meta").stride()


def describe(tensor: torch.Tensor, **facts: Any) -> tuple[TensorMeta, list[torch.Tensor]]:
    """Describe a tensor, and return the flat byte tensors to send: views of its memory where possible.

    Args:
        facts: further attributes of the description.
    """
    data = unmarked(tensor)
    if data.layout != torch.strided:
        parts = [describe(part) for part in dense_parts(data)]
        meta = meta_of(tensor, parts=tuple(meta for meta, _ in parts), **facts)
        return meta, [flat for _, flats in parts for flat in flats]
    if not _is_dense(data):
        data = data.contiguous()
    return meta_of(tensor, strides=data.stride(), **facts), ([bytes_of(data)] if data.numel() else [])


def meta_of(tensor: torch.Tensor, **facts: Any) -> TensorMeta:
    """Describe a tensor, without the parts of a sparse one. ``facts``: as for :func:`describe`."""
    attributes = {
        "is_parameter": isinstance(tensor, nn.Parameter),
        "requires_grad": tensor.requires_grad and tensor.is_leaf,
        "on_cpu": tensor.device.type == "cpu",
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "strides": unmarked(tensor).stride() if tensor.layout == torch.strided else None,
        "layout": tensor.layout,
        "is_coalesced": tensor.layout == torch.sparse_coo and unmarked(tensor).is_coalesced(),
    }
    return TensorMeta(**{**attributes, **facts})


def find_bases(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """Find each tensor that lies in the memory of another, of any dtype, so that views stay views.

    Returns:
        By number of such a tensor, that of the other one, and the offset in its memory in bytes.
    """
    bases: dict[int, tuple[int, int]] = {}
    bare = [*map(unmarked, tensors)]
    strided = [n for n, tensor in enumerate(bare) if tensor.layout == torch.strided and tensor.numel()]
    order = sorted(strided, key=lambda n: (str(bare[n].device), bare[n].data_ptr(), -_span_of(bare[n]), n))
    base: int | None = None
    for number in order:
        tensor = bare[number]
        if base is not None and _lies_in(tensor, bare[base]):
            bases[number] = base, tensor.data_ptr() - bare[base].data_ptr()
        elif _is_dense(tensor):
            base = number
    return bases


def _lies_in(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    end = base.data_ptr() + _span_of(base)
    inside = base.data_ptr() <= tensor.data_ptr() and tensor.data_ptr() + _span_of(tensor) <= end
    return inside and tensor.device == base.device


def _span_of(tensor: torch.Tensor) -> int:
    return _span(tensor.shape, tensor.stride(), tensor.dtype)


def _span(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """Count the bytes from the first element to the last."""
    return (sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1) * dtype.itemsize


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold a tensor's values: itself, or the parts of a sparse CSR or COO tensor."""
    data = unmarked(tensor)
    if data.layout == torch.strided:
        return (data,)
    if data.layout == torch.sparse_csr:
        return data.crow_indices(), data.col_indices(), data.values()
    if data.layout == torch.sparse_coo:
        return parts_of_sparse(data)  # not coalesced, which would change the order of later sums
    raise TypeError(f"a tensor of layout {data.layout} cannot be sent")


def num_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor's memory; unlike torch's ``nbytes``, of sparse ones too."""
    return sum(part.nbytes for part in dense_parts(tensor))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no gaps and no overlap: it is a permuted contiguous tensor."""
    if tensor.is_contiguous():
        return True
    strides, shape = tensor.stride(), tensor.shape
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], -shape[axis]))
    return tensor.permute(order).is_contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a dense tensor as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def view_of(base: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """View the memory of ``base``, which is dense, as the tensor that ``meta`` describes."""
    assert meta.strides is not None, "a sparse tensor is no view"
    memory = bytes_of(base)[meta.offset : meta.offset + _span(meta.shape, meta.strides, meta.dtype)]
    return memory.view(meta.dtype).as_strided(meta.shape, meta.strides)


def restored(meta: TensorMeta, data: torch.Tensor) -> torch.Tensor:
    """Make the tensor that ``meta`` describes, in the memory of ``data``."""
    if meta.is_parameter:
        return nn.Parameter(data, requires_grad=meta.requires_grad)
    return data.requires_grad_() if meta.requires_grad else data


def restored_sparse(meta: TensorMeta, parts: list[torch.Tensor]) -> torch.Tensor:
    """Make the sparse tensor that ``meta`` describes from its dense parts."""
    if meta.layout == torch.sparse_csr:
        crow, col, values = parts
        return torch.sparse_csr_tensor(crow, col, values, meta.shape, dtype=meta.dtype)
    indices, values = parts
    return torch.sparse_coo_tensor(indices, values, meta.shape, is_coalesced=meta.is_coalesced)
