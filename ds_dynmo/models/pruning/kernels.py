"""Products by a weight of which only the kept values and their places are there.

A weight ``[outputs, inputs]`` is a vector of values beside ``index``, int32, their ascending places in the flattened
weight. Each kernel derives the rest from these in every pass, which costs little beside a product by many tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.models.capabilities import can_compute
from ds_dynmo.weight_gradients import defer_weight_gradient, waits

__all__ = ["CSR", "DENSE", "NOTHING", "TRANSPOSED", "Kernel", "Shape", "can_csr", "compressed_linear", "dense"]

RADIX_SORTED = 1 << 15  # torch sorts so many integers or more by radix on the CPU, several times as fast

Shape = tuple[int, int]
Bias = torch.Tensor | None


class Kernel(ABC):
    """How ``Y = X W^T + b`` is computed, forward and backward. All tensors are of rows: ``[tokens, features]``."""

    @abstractmethod
    def kept(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the input as forward and backward passes need it."""

    @abstractmethod
    def outputs(
        self, kept: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape, bias: Bias
    ) -> torch.Tensor:
        """Compute ``Y``."""

    @abstractmethod
    def of_rows(self, gradient: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Compute ``dX = dY W``."""

    @abstractmethod
    def of_values(self, gradient: torch.Tensor, kept: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Compute ``dW = dY^T X`` at the kept places."""

    def workspace_elements(self, shape: Shape) -> int:
        """Count the elements of the largest tensor of the weight's size that a pass makes and frees again."""
        return 0


class _Dense(Kernel):
    """Scatters the values to a dense weight for every product, and gathers its gradient. Never two such at a time."""

    def kept(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def outputs(
        self, kept: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape, bias: Bias
    ) -> torch.Tensor:
        return F.linear(kept, dense(values, index, shape), bias)

    def of_rows(self, gradient: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        return gradient.mm(dense(values, index, shape))

    def of_values(self, gradient: torch.Tensor, kept: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        return gradient.t().mm(kept).view(-1).index_select(0, index)

    def workspace_elements(self, shape: Shape) -> int:
        return shape[0] * shape[1]


class _Transposed(_Dense):
    """As :class:`_Dense`, where the weight is ``[inputs, outputs]``, as that of Hugging Face's ``Conv1D``."""

    def outputs(
        self, kept: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape, bias: Bias
    ) -> torch.Tensor:
        weight = dense(values, index, shape[::-1])
        return kept.mm(weight) if bias is None else torch.addmm(bias, kept, weight)

    def of_rows(self, gradient: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        return gradient.mm(dense(values, index, shape[::-1]).t())

    def of_values(self, gradient: torch.Tensor, kept: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        return kept.t().mm(gradient).view(-1).index_select(0, index)


class _CSR(Kernel):
    """Compressed sparse rows: ``Y^T = W X^T``, ``dX^T = W^T dY^T``, ``dW`` by a sampled product (SDDMM).

    All three need ``X^T`` and ``dY^T`` in rows. The input is transposed once and kept so.
    """

    def kept(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.t().contiguous()

    def outputs(
        self, kept: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape, bias: Bias
    ) -> torch.Tensor:
        product = (_in_rows(index, values, shape) @ kept).t().contiguous()
        return product if bias is None else product.add_(bias)

    def of_rows(self, gradient: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        outputs, inputs = shape
        columns, order = _by_column(index % inputs, inputs)
        rows = (index // inputs).index_select(0, order)
        weight = _csr(_starts(columns, inputs, 1), rows, values.index_select(0, order), (inputs, outputs))
        return (weight @ gradient.t().contiguous()).t().contiguous()

    def of_values(self, gradient: torch.Tensor, kept: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        places = _in_rows(index, gradient.new_zeros(len(index)), shape)  # zeros: torch multiplies them by beta
        products: torch.Tensor = torch.sparse.sampled_addmm(places, gradient.t().contiguous(), kept.t(), beta=0.0)
        return products.values()


class _Nothing(Kernel):
    """No product at all, of a weight of which nothing is kept."""

    def kept(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_empty(len(rows), 0)

    def outputs(
        self, kept: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape, bias: Bias
    ) -> torch.Tensor:
        zeros = kept.new_zeros(len(kept), shape[0])
        return zeros if bias is None else zeros.add_(bias)

    def of_rows(self, gradient: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        return gradient.new_zeros(len(gradient), shape[1])

    def of_values(self, gradient: torch.Tensor, kept: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        return gradient.new_zeros(len(index))


DENSE, TRANSPOSED, CSR, NOTHING = _Dense(), _Transposed(), _CSR(), _Nothing()


def compressed_linear(
    hidden: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape, kernel: Kernel, bias: Bias = None
) -> torch.Tensor:
    """Compute ``hidden @ weight.T + bias`` by the kept values of a weight.

    Args:
        hidden: ``[..., inputs]``.
        values: ``[kept]``. A parameter's gradient can wait for the second part of a backward pass.
        index: int32 ``[kept]``, ascending.
        shape: ``(outputs, inputs)``.
    """
    if torch.is_autocast_enabled(hidden.device.type):  # as autocast casts the inputs of torch's own products
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, values, bias = hidden.to(dtype), values.to(dtype), None if bias is None else bias.to(dtype)
        kernel = DENSE if kernel is CSR and not can_csr(dtype, values.device) else kernel
    rows = hidden.reshape(-1, hidden.shape[-1])
    inside = bias if hidden.dim() == 2 or hidden.is_contiguous() else None  # else torch adds it afterwards
    outputs: torch.Tensor
    if waits(values):
        anchor = torch.empty(0, requires_grad=True)
        inputs = rows, inside, (values,), index, shape, kernel, anchor
        outputs = _DeferredCompressedLinear.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        outputs = _CompressedLinear.apply(rows, inside, values, index, shape, kernel)  # type: ignore[no-untyped-call]
    outputs = outputs.view(*hidden.shape[:-1], shape[0])
    return outputs if bias is None or inside is not None else outputs + bias


class _CompressedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        bias: Bias,
        values: torch.Tensor,
        index: torch.Tensor,
        shape: Shape,
        kernel: Kernel,
    ) -> torch.Tensor:
        kept = kernel.kept(rows)
        ctx.save_for_backward(kept, values, index)
        ctx.shape, ctx.kernel = shape, kernel
        return kernel.outputs(kept, values, index, shape, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept, values, index = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        of_rows = kernel.of_rows(gradient, values, index, ctx.shape) if ctx.needs_input_grad[0] else None
        of_bias = gradient.sum(0) if ctx.needs_input_grad[1] else None
        of_values = kernel.of_values(gradient, kept, index, ctx.shape) if ctx.needs_input_grad[2] else None
        return of_rows, of_bias, of_values, None, None, None


class _DeferredCompressedLinear(torch.autograd.Function):
    """:class:`_CompressedLinear` whose weight gradient waits for the second part of a backward pass.

    The values are hidden from autograd, which calls the backward method for the sake of ``anchor``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        bias: Bias,
        hidden: tuple[nn.Parameter],
        index: torch.Tensor,
        shape: Shape,
        kernel: Kernel,
        anchor: torch.Tensor,
    ) -> torch.Tensor:
        kept = kernel.kept(rows)
        ctx.save_for_backward(kept, index)
        ctx.hidden, ctx.shape, ctx.kernel = hidden, shape, kernel
        return kernel.outputs(kept, hidden[0].detach(), index, shape, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (kept, index), (values,), shape = ctx.saved_tensors, ctx.hidden, ctx.shape
        kernel: Kernel = ctx.kernel
        held_bytes = kept.nbytes + gradient.nbytes
        defer_weight_gradient(values, lambda: kernel.of_values(gradient, kept, index, shape), held_bytes=held_bytes)
        of_rows = kernel.of_rows(gradient, values.detach(), index, shape) if ctx.needs_input_grad[0] else None
        of_bias = gradient.sum(0) if ctx.needs_input_grad[1] else None
        return of_rows, of_bias, None, None, None, None, None


def dense(values: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Make the dense weight, with zeros where it is pruned."""
    return values.new_zeros(shape[0] * shape[1]).index_copy_(0, index.long(), values).view(shape)


@cache
def can_csr(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch has all three products in CSR, by trying them: in bf16 it has none on the CPU."""

    def attempt() -> None:
        index = torch.tensor([0, 3], dtype=torch.int32, device=device)
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        CSR.outputs(ones, ones[0], index, (2, 2), None)
        CSR.of_rows(ones, ones[0], index, (2, 2))
        CSR.of_values(ones, ones, index, (2, 2))

    return can_compute(attempt)


def _in_rows(index: torch.Tensor, values: torch.Tensor, shape: Shape) -> torch.Tensor:
    rows, columns = shape
    return _csr(_starts(index, rows, columns), index % columns, values, shape)


def _csr(crow: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: Shape) -> torch.Tensor:
    return torch.sparse_csr_tensor(crow, columns, values, shape, check_invariants=False)


def _starts(ascending: torch.Tensor, rows: int, step: int) -> torch.Tensor:
    """Find where each of ``rows`` begins among numbers, of which a row has ``step``."""
    bounds = torch.arange(rows + 1, dtype=torch.int32, device=ascending.device) * step
    return torch.searchsorted(ascending, bounds, out_int32=True)


def _by_column(columns: torch.Tensor, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort columns, equal ones in their order. Give them, and the place of each."""
    missing = max(0, RADIX_SORTED - len(columns)) if columns.device.type == "cpu" else 0
    padded = torch.cat([columns, columns.new_full((missing,), inputs)]) if missing else columns
    ordered, places = padded.sort(stable=True)
    return ordered[: len(columns)], places[: len(columns)]
