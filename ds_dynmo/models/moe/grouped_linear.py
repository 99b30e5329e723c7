"""Apply a linear layer to each group of rows, as experts do to their tokens.

Where torch has one kernel for the products of all groups, it is used, else a loop. On a CPU both compute the same bits;
the kernel is faster where groups are many and small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.models.capabilities import can_compute, refusing_host_waits
from ds_dynmo.models.host_numbers import integers
from ds_dynmo.weight_gradients import defer_weight_gradient, waits

_grouped_mm = getattr(F, "grouped_mm", None)  # from torch 2.10 on
ALIGNMENT = 16  # bytes: the kernel needs rows and matrices to begin at multiples of it

__all__ = ["grouped_linear"]


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Compute ``F.linear(rows of group g, weight[g])`` for each group; nothing is computed for groups without rows.

    Args:
        rows: ``[rows, inputs]``, the groups one after the other.
        weight: ``[groups, outputs, inputs]``.
        counts: rows of each group; their sum is ``len(rows)``.

    Returns:
        ``[rows, outputs]``.
    """
    if torch.is_autocast_enabled(rows.device.type):  # as autocast casts the inputs of torch's own products
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
    outputs: torch.Tensor
    if waits(weight):
        anchor = torch.empty(0, requires_grad=True)
        outputs = _DeferredGroupedLinear.apply(rows, list(counts), (weight,), anchor)  # type: ignore[no-untyped-call]
    else:
        outputs = _GroupedLinear.apply(rows, weight, list(counts))  # type: ignore[no-untyped-call]
    return outputs


class _GroupedLinear(torch.autograd.Function):
    """Writes every product straight to its place; autograd over slices would add up a whole gradient per group."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return _products(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        of_rows = _of_rows(gradient, weight, ctx.counts) if ctx.needs_input_grad[0] else None
        of_weight = _of_weight(gradient, rows, ctx.counts) if ctx.needs_input_grad[1] else None
        return of_rows, of_weight, None


def _products(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    if has_kernel(rows, weight.shape[1]):
        return _in_one(_aligned(rows), _aligned(weight).mT, _ends(counts, rows.device))
    outputs = rows.new_empty(rows.shape[0], weight.shape[1])
    for group, of_group in _groups(counts):
        torch.mm(rows[of_group], weight[group].t(), out=outputs[of_group])
    return outputs


def _of_rows(gradient: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    if has_kernel(gradient, weight.shape[2]):
        return _in_one(_aligned(gradient), _aligned(weight), _ends(counts, gradient.device))
    of_rows = gradient.new_empty(gradient.shape[0], weight.shape[2])
    for group, of_group in _groups(counts):
        torch.mm(gradient[of_group], weight[group], out=of_rows[of_group])
    return of_rows


def _of_weight(gradient: torch.Tensor, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    if has_kernel(rows, gradient.shape[1]):
        of_weight = _in_one(_aligned(gradient).t(), _aligned(rows), _ends(counts, rows.device))
    else:
        of_weight = rows.new_empty(len(counts), gradient.shape[1], rows.shape[1])
        for group, of_group in _groups(counts):
            torch.mm(gradient[of_group].t(), rows[of_group], out=of_weight[group])
    for group, count in enumerate(counts):
        if not count:
            of_weight[group].zero_()
    return of_weight


def _groups(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Iterate over the groups that have rows, and where these are."""
    start = 0
    for group, count in enumerate(counts):
        if count:
            yield group, slice(start, start + count)
        start += count


def _in_one(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Call the kernel. Groups lie in the dimensions that are not the weight's."""
    assert _grouped_mm is not None
    products: torch.Tensor = _grouped_mm(left, right, offs=ends)
    return products


def _ends(counts: list[int], device: torch.device) -> torch.Tensor:
    """Return where each group ends, as the kernel wants it."""
    return integers(list(accumulate(counts)), device, torch.int32)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` row by row in memory, from an aligned place on; never a parameter, which a module may watch."""
    contiguous = tensor.detach().contiguous()
    return contiguous if contiguous.data_ptr() % ALIGNMENT == 0 else contiguous.clone()


class _DeferredGroupedLinear(torch.autograd.Function):
    """:class:`_GroupedLinear` whose weight gradient waits for the second part of a backward pass.

    The weight is hidden from autograd, which calls the backward method for the sake of ``anchor``.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, counts: list[int], hidden: tuple[nn.Parameter], anchor: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.counts, ctx.hidden = counts, hidden
        return _products(rows, hidden[0].detach(), counts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (rows,), (weight,), counts = ctx.saved_tensors, ctx.hidden, ctx.counts
        held_bytes = rows.nbytes + gradient.nbytes
        defer_weight_gradient(weight, lambda: _of_weight(gradient, rows, counts), held_bytes=held_bytes)
        of_rows = _of_rows(gradient, weight.detach(), counts) if ctx.needs_input_grad[0] else None
        return of_rows, None, None, None


def has_kernel(rows: torch.Tensor, outputs: int) -> bool:
    """Return whether torch has one kernel for the products of all groups, with weights ``[groups, outputs, inputs]``.

    That depends neither on counts nor on where a tensor lies in memory: a layer computes the same after a move.
    """
    if _grouped_mm is None or not len(rows):
        return False
    if any(width * rows.dtype.itemsize % ALIGNMENT for width in (rows.shape[1], outputs)):
        return False
    return _has_grouped_products(rows.dtype, rows.device)


@cache
def _has_grouped_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Try the products of the forward pass, of the rows' gradient and of the weight's, of two groups.

    Where torch has no kernel on an accelerator, it copies the ends of the groups to the host and loops. The host has
    the counts here, so this module's own loop is faster: such an operator does not count.
    """
    width = ALIGNMENT  # elements: aligned in every dtype

    def attempt() -> None:
        rows = torch.ones(3, width, dtype=dtype, device=device)
        weight, ends = rows.new_ones(2, width, width), _ends([1, 2], device)
        with refusing_host_waits(device):
            _in_one(rows, weight.mT, ends)
            _in_one(rows, weight, ends)
            _in_one(rows.t(), rows, ends)

    return can_compute(attempt)
