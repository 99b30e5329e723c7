"""Apply a linear layer to each group of rows, as experts do to their tokens.

torch computes the products of all groups in one call, in which rows and columns begin at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.models.host_numbers import integers
from ds_dynmo.weight_gradients import defer_weight_gradient, waits

ALIGNMENT = 16  # bytes

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
    return F.grouped_mm(_aligned(rows), _aligned(weight).mT, offs=_ends(counts, rows.device))


def _of_rows(gradient: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return F.grouped_mm(_aligned(gradient), _aligned(weight), offs=_ends(counts, gradient.device))


def _of_weight(gradient: torch.Tensor, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    of_weight = F.grouped_mm(_aligned(gradient).t(), _aligned(rows), offs=_ends(counts, rows.device))
    for group, count in enumerate(counts):
        if not count:
            of_weight[group].zero_()
    return of_weight


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
