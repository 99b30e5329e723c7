"""Tensors as they travel: flat bytes, and a description by which the receiver allocates the same tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_dynmo.torch_private import parts_of_sparse


@dataclass(frozen=True)
class TensorMeta:
    """The description of a tensor by which a receiver allocates it.

    Attributes:
        strides: None for a sparse tensor, which travels as its dense ``parts``.
        name: in the layer, if it is a parameter of the layer.
        constant: whether only the optimizer's step changes it.
        sent_ahead: number among the constant tensors that were sent before; it does not travel again.
        base, offset: for a view, the number of the tensor in whose memory it lies, and the offset in elements; it does
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
    data = tensor.detach()
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
        "strides": tensor.stride() if tensor.layout == torch.strided else None,
        "layout": tensor.layout,
        "is_coalesced": tensor.layout == torch.sparse_coo and tensor.is_coalesced(),
    }
    return TensorMeta(**{**attributes, **facts})


def find_bases(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Map each tensor that lies in the memory of another to that one, by number, so that views stay views."""
    bases: dict[int, int] = {}
    strided = [n for n, tensor in enumerate(tensors) if tensor.layout == torch.strided and tensor.numel()]
    order = sorted(strided, key=lambda n: (str(tensors[n].device), tensors[n].data_ptr(), -_span(tensors[n]), n))
    base: int | None = None
    for number in order:
        tensor = tensors[number]
        if base is not None and _lies_in(tensor, tensors[base]):
            bases[number] = base
        elif _is_dense(tensor):
            base = number
    return bases


def _lies_in(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    end = base.data_ptr() + _span(base)
    inside = base.data_ptr() <= tensor.data_ptr() and tensor.data_ptr() + _span(tensor) <= end
    return inside and tensor.device == base.device and tensor.dtype == base.dtype


def _span(tensor: torch.Tensor) -> int:
    """Count the bytes from the first element to the last."""
    return (sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold a tensor's values: itself, or the parts of a sparse CSR or COO tensor."""
    data = tensor.detach()
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
