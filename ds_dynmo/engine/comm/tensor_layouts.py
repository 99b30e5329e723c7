"""How a tensor lies in memory: a message carries its elements in the order of memory, and its strides beside them.

torch's kernels add, and choose their instructions, by the strides of what they are given. So a stage computes with the
strides that a tensor would have if no boundary were there: a transposed one, a slice of a larger one, one that repeats
its elements by a stride of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

Strides = tuple[int, ...]


def strides_of(tensor: torch.Tensor) -> Strides:
    """Return the strides with which a tensor arrives: its own, or those of a contiguous one where elements overlap."""
    strides = torch.Tensor.stride(tensor)
    if torch.Tensor.is_contiguous(tensor) or _is_apart(tensor.shape, strides):
        return strides
    return torch.empty(tensor.shape, device="meta").stride()


def packed(tensor: torch.Tensor, strides: Strides) -> torch.Tensor:
    """Return the elements as a contiguous tensor of the same shape, in the order in which memory has them.

    Args:
        strides: those by which they are ordered.
    """
    tensor = torch.resolve_neg(torch.resolve_conj(tensor))  # a message has what is in memory
    if torch.Tensor.is_contiguous(tensor) and torch.Tensor.stride(tensor) == strides:
        return tensor
    return torch.permute(tensor, _order(strides)).contiguous().view(tensor.shape)


def unpacked(elements: torch.Tensor, strides: Strides) -> torch.Tensor:
    """Return the tensor with these ``strides`` whose :func:`packed` elements these are, in their memory if they fit."""
    shape = elements.shape
    if elements.stride() == strides or elements.numel() == 0:
        return elements
    once = [1 if stride == 0 else size for size, stride in zip(shape, strides)]
    order = _order(strides)
    in_order = elements.view([shape[dimension] for dimension in order])
    content = in_order.permute([order.index(dimension) for dimension in range(len(order))])
    copies = elements.view(-1, prod(once))  # what a stride of 0 repeats is outermost
    if len(copies) > 1 and not bool((copies == copies[:1]).all()):  # of a later message, which repeats nothing
        return content.contiguous()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(once, strides))
    if extent == prod(once):
        return elements.as_strided(shape, strides)
    memory = elements.new_empty(extent)
    memory.as_strided(once, strides).copy_(content[tuple(slice(size) for size in once)])
    return memory.as_strided(shape, strides)


def _order(strides: Sequence[int]) -> list[int]:
    """Sort dimensions, the outermost in memory first; those that repeat elements before all others."""
    return sorted(range(len(strides)), key=lambda dimension: (strides[dimension] != 0, -strides[dimension]))


def _is_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements lie apart from each other, but for those that a stride of 0 repeats."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if stride and size > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return prod(shape) > 0
