"""Products by weights that are hidden from autograd, so that their gradients can be deferred.

The formulas are those of autograd (torch 2.13, csrc/autograd/FunctionsManual.cpp), so that results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import grouped_mm, reshaped, version_of, will_run
from ds_dynmo.unmarked import unmarked
from ds_dynmo.weight_gradients import Compute, RowIndex, defer_row, waits


class Operand(NamedTuple):
    """The second operand of a product; a tuple, so that autograd does not see it.

    Attributes:
        value: a tensor without gradient; None: there is no bias.
        owner: the parameter that gets the gradient; None: a constant.
        row: number of the row of the owner that ``value`` is; None: the whole owner.
    """

    value: torch.Tensor | None
    owner: nn.Parameter | None = None
    row: RowIndex = None


class _Product(torch.autograd.Function):
    """The common base of products."""

    @staticmethod
    def keep(ctx: Any, input: torch.Tensor, *arguments: Any) -> None:
        ctx.save_for_backward(input)
        ctx.set_materialize_grads(False)  # without a gradient the weights get none either
        ctx.arguments = arguments

    @staticmethod
    def defer(ctx: Any, operand: Operand, compute: Compute, held: Sequence[torch.Tensor], held_bytes: int = 0) -> None:
        """Defer ``compute``, if this backward pass computes gradients of weights.

        Args:
            held: its inputs, unchanged so far.
        """
        if operand.owner is not None and will_run(ctx.next_functions[-1][0]):  # the anchor's
            defer_row(operand.owner, operand.row, _of_unchanged(held, compute), held_bytes=held_bytes)

    @staticmethod
    def check() -> None:
        """Refuse a backward pass that is differentiated itself: hidden weights would be missing.

        Raises:
            ConfigError: with the remedy.
        """
        if torch.is_grad_enabled():
            raise ConfigError(
                "a gradient is asked for with create_graph=True, in a backward pass that is in two parts: that cannot "
                'be differentiated; set dynmo.schedule.kind to "1f1b"'
            )


class Linear(_Product):
    """``nn.functional.linear``."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: Operand, bias: Operand, anchor: torch.Tensor) -> torch.Tensor:
        _Product.keep(ctx, input, weight, bias)
        assert weight.value is not None
        rows = _rows(input)
        if input.ndim == 2 or unmarked(input).is_contiguous():
            outputs = nn.functional.linear(rows, weight.value, bias.value)
        else:  # torch adds the bias afterwards
            outputs = rows.mm(weight.value.t())
            if bias.value is not None:
                outputs += bias.value
        return _shaped(outputs, input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        _Product.check()
        if gradient is None:
            return None, None, None, None
        (input,), (weight, bias) = ctx.saved_tensors, ctx.arguments
        rows, of_rows = _rows(input), _rows(gradient)
        sums_rows = input.ndim == 2 or unmarked(input).is_contiguous()
        others = tuple(range(gradient.ndim - 1))
        held, held_bytes = (rows, of_rows), rows.nbytes + of_rows.nbytes
        _Product.defer(ctx, weight, lambda: of_rows.t().mm(rows), held, held_bytes)
        _Product.defer(ctx, bias, lambda: of_rows.sum(0) if sums_rows else gradient.sum(others), held[1:])
        to_input = None
        if ctx.needs_input_grad[0]:
            by_columns = rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]
            to_rows = weight.value.t().mm(of_rows.t()).t() if by_columns else of_rows.mm(weight.value)
            to_input = to_rows.view(input.shape) if input.ndim != 2 else to_rows
        return to_input, None, None, None


class Conv1D(_Product):
    """The ``Conv1D`` of Hugging Face's GPT-2: a linear layer whose weight is ``[inputs, outputs]``."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: Operand, bias: Operand, anchor: torch.Tensor) -> torch.Tensor:
        _Product.keep(ctx, input, weight, bias)
        assert weight.value is not None and bias.value is not None
        return _shaped(torch.addmm(bias.value, _rows(input), weight.value), input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        _Product.check()
        if gradient is None:
            return None, None, None, None
        (input,), (weight, bias) = ctx.saved_tensors, ctx.arguments
        rows, of_rows = _rows(input), _rows(gradient)
        held, held_bytes = (rows, of_rows), rows.nbytes + of_rows.nbytes
        _Product.defer(ctx, weight, lambda: rows.t().mm(of_rows), held, held_bytes)
        _Product.defer(ctx, bias, lambda: of_rows.sum(0), held[1:])
        to_input = of_rows.mm(weight.value.t()).view(input.shape) if ctx.needs_input_grad[0] else None
        return to_input, None, None, None


class GroupedMM(_Product):
    """``nn.functional.grouped_mm`` of rows by the weights of experts, ``[experts, ...]``, or by their transposes."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: Operand, transposed: bool, offsets: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        _Product.keep(ctx, rows, weight, transposed, offsets)
        assert weight.value is not None
        return grouped_mm(rows, weight.value.mT if transposed else weight.value, offs=offsets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        _Product.check()
        if gradient is None:
            return None, None, None, None, None
        (rows,), (weight, transposed, offsets) = ctx.saved_tensors, ctx.arguments
        rows, of_rows = unmarked(rows), gradient.detach()
        left, right = (of_rows, rows) if transposed else (rows, of_rows)
        held, held_bytes = (offsets, rows, of_rows), rows.nbytes + of_rows.nbytes
        _Product.defer(ctx, weight, lambda: grouped_mm(left.mT, right, offs=offsets), held, held_bytes)
        to_rows = None
        if ctx.needs_input_grad[0]:
            to_rows = grouped_mm(of_rows, weight.value if transposed else weight.value.mT, offs=offsets)
        return to_rows, None, None, None, None


def _of_unchanged(held: Sequence[torch.Tensor], compute: Compute) -> Compute:
    """Wrap a deferred ``compute`` so that it fails if its inputs were changed in place meanwhile.

    Autograd does not check this any more: it has already passed the saved tensors to the backward pass.
    """
    versions = [version_of(tensor) for tensor in held]

    def checked() -> torch.Tensor:
        if versions != [version_of(tensor) for tensor in held]:
            raise ConfigError(
                f"the input of a linear layer, or its output's gradient, of {len(held[-1])} rows, was changed in place "
                "before the weights' gradient was calculated, which in a backward pass in two parts is later than "
                "usual: a tensor is used for several micro-batches, or a backward function changes what it is given; "
                'make a copy there, or set dynmo.schedule.kind to "1f1b"'
            )
        return compute()

    return checked


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return unmarked(tensor).reshape(-1, tensor.shape[-1])


def _shaped(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape ``rows`` like ``like``, except for the last dimension. No view: the next layer may change it."""
    return reshaped(rows, [*like.shape[:-1], rows.shape[1]]) if like.ndim != 2 else rows


def operand(weight: Any) -> Operand | None:
    """Return a parameter or constant as an operand; None: it is neither."""
    if weight is None or not weight.requires_grad:
        return Operand(weight)
    return Operand(weight, weight) if type(weight) is nn.Parameter else None


def split(product: Any, input: Any, weight: Operand | None, bias: Operand | None) -> torch.Tensor | None:
    """Multiply by hidden weights; None: autograd has to see them, or would compute other bits.

    Args:
        product: :class:`Linear` or :class:`Conv1D`.
    """
    if weight is None or bias is None or weight.value is None or not _is_plain(input, weight.value):
        return None
    if not unmarked(input).is_contiguous() and (product is Conv1D or (input.ndim > 2 and weight.owner is None)):
        return None
    owners = [factor.owner for factor in (weight, bias) if factor.owner is not None]
    return _multiply(product, input, weight, bias) if owners and waits(*owners) else None


def split_grouped(rows: Any, weight: Operand, offsets: torch.Tensor, *, transposed: bool) -> torch.Tensor | None:
    """Multiply groups of rows by hidden weights, or by their transposes; None: as for :func:`split`."""
    if weight.value is None or weight.value.ndim != 3 or min(weight.value.shape) < 2:
        return None
    if (
        not _is_plain(rows, weight.value)
        or rows.ndim != 2
        or not unmarked(rows).is_contiguous()
        or not waits(weight.owner)
    ):
        return None
    return _multiply(GroupedMM, rows, weight, transposed, offsets)


def _multiply(product: Any, input: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Apply a product; an anchor makes autograd run its backward pass if the input needs no gradient."""
    result: torch.Tensor = product.apply(input, *arguments, torch.empty(0, requires_grad=True, device="cpu"))
    return result


def _is_plain(input: Any, weight: torch.Tensor) -> bool:
    return (
        type(input) in (torch.Tensor, nn.Parameter)
        and input.ndim > 1
        and torch.numel(input) > 0
        and input.dtype == weight.dtype
        and not torch.is_complex(input)
        and unmarked(weight).is_contiguous()
    )
