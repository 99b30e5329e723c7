"""Apply a linear layer to each group of rows: what each expert does to its own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

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
    outputs: torch.Tensor = _GroupedLinear.apply(rows, weight, list(counts))
    return outputs


class _GroupedLinear(torch.autograd.Function):
    """Writes every product straight to its place; autograd over slices would add up a whole gradient per group."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        outputs = rows.new_empty(rows.shape[0], weight.shape[1])
        for group, of_group in _groups(counts):
            torch.mm(rows[of_group], weight[group].t(), out=outputs[of_group])
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for group, of_group in _groups(ctx.counts):
            if of_rows is not None:
                torch.mm(gradient[of_group], weight[group], out=of_rows[of_group])
            if of_weight is not None:
                torch.mm(gradient[of_group].t(), rows[of_group], out=of_weight[group])
        if of_weight is not None:
            for group, count in enumerate(ctx.counts):
                if not count:
                    of_weight[group].zero_()
        return of_rows, of_weight, None


def _groups(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Iterate over the groups that have rows, and where these are."""
    start = 0
    for group, count in enumerate(counts):
        if count:
            yield group, slice(start, start + count)
        start += count
