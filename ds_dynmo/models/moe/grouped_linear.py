"""Apply a linear layer to each group of rows: what each expert does to its own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynmo.weight_gradients import defer_weight_gradient, waits

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
        outputs = _Split.apply(rows, list(counts), (weight,), torch.empty(0, requires_grad=True))
    else:
        outputs = _GroupedLinear.apply(rows, weight, list(counts))
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


class _Split(torch.autograd.Function):
    """The same, in a backward pass in two parts: the weight is hidden, ``anchor`` makes autograd come here."""

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


def _products(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    outputs = rows.new_empty(rows.shape[0], weight.shape[1])
    for group, of_group in _groups(counts):
        torch.mm(rows[of_group], weight[group].t(), out=outputs[of_group])
    return outputs


def _of_rows(gradient: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    of_rows = gradient.new_empty(gradient.shape[0], weight.shape[2])
    for group, of_group in _groups(counts):
        torch.mm(gradient[of_group], weight[group], out=of_rows[of_group])
    return of_rows


def _of_weight(gradient: torch.Tensor, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
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
