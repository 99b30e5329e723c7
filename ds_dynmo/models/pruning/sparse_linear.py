"""A linear layer whose weights can be pruned: dense at first, and compressed sparse rows where those are faster.

Where nothing is kept there is no product at all. While it computes densely the mask costs nothing: pruned weights are
exactly 0, and :class:`~ds_dynmo.models.Pruning` sets their gradients to 0 once a batch, before they are used.

The parameter stays the dense weight for life, with exact zeros where it is pruned, so that optimizers, moves and
checkpoints know it as before. Beside it there are buffers: the mask, 1 byte per weight, and where the layer computes in
CSR the structure of the matrix and of its transpose, 16 bytes per weight that stays. CSR values are gathered from the
dense weight in every pass. What travels and is stored so is the dense weight, its dense optimizer state and these
buffers: pruning saves time, not memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["PrunableLinear", "csr_is_faster", "csr_linear", "csr_structure", "no_linear"]

Structure = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PrunableLinear(nn.Module):
    """``hidden @ weight.T``, at first dense.

    Where it computes densely, pruned weights get gradients too. The caller sets these to 0 where the mask is False,
    after the last micro-batch and before the step, so that pruned weights stay 0.

    Args:
        weight: ``[outputs, inputs]``.
        csr_from: from what share of pruned weights on the layer computes in CSR, where it can (fp32 on a CPU with MKL);
            None: where :func:`csr_is_faster`.
    """

    mask: torch.Tensor | None
    crow: torch.Tensor | None
    col: torch.Tensor | None
    index: torch.Tensor | None
    crow_transposed: torch.Tensor | None
    col_transposed: torch.Tensor | None
    index_transposed: torch.Tensor | None

    def __init__(self, weight: nn.Parameter, csr_from: float | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.csr_from = csr_from
        for name in ("mask", "crow", "col", "index", "crow_transposed", "col_transposed", "index_transposed"):
            self.register_buffer(name, None)

    @property
    def kept(self) -> int:
        """How many weights are not pruned."""
        return self.weight.numel() if self.mask is None else int(self.mask.sum())

    @property
    def computes_in_csr(self) -> bool:
        """Does the next pass use CSR?"""
        return self.crow is not None and _can_csr(self.weight)

    def prune(self, mask: torch.Tensor) -> None:
        """Keep the weights where ``mask``, bool ``[outputs, inputs]``, is True; the others are 0 from now on."""
        self.mask = mask
        self.weight.detach().masked_fill_(~mask, 0)
        self.crow = self.col = self.index = None
        self.crow_transposed = self.col_transposed = self.index_transposed = None
        if not mask.any():
            self.index = torch.zeros(0, dtype=torch.int32, device=mask.device)
        elif _can_csr(self.weight) and self._wants_csr():
            self.crow, self.col, self.index = csr_structure(mask)
            self.crow_transposed, self.col_transposed, index = csr_structure(mask.t())
            outputs, inputs = mask.shape
            self.index_transposed = index % outputs * inputs + index // outputs  # where it lies in the weight

    def _wants_csr(self) -> bool:
        outputs, inputs = self.weight.shape
        if self.csr_from is None:
            return csr_is_faster(outputs, inputs, self.kept)
        return outputs * inputs - self.kept >= self.csr_from * outputs * inputs

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.index is not None and not len(self.index):
            return no_linear(hidden, self.weight)
        if not self.computes_in_csr:
            return F.linear(hidden, self.weight)
        assert self.crow is not None and self.col is not None and self.index is not None
        assert self.crow_transposed is not None
        assert self.col_transposed is not None and self.index_transposed is not None
        structure = self.crow, self.col, self.index
        transposed = self.crow_transposed, self.col_transposed, self.index_transposed
        return csr_linear(hidden, self.weight, structure, transposed)

    def extra_repr(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}, csr_from={self.csr_from}"


def csr_is_faster(outputs: int, inputs: int, kept: int) -> bool:
    """Is CSR expected to be faster than dense, forward and backward, with ``kept`` weights in fp32 on one CPU core?

    The rule is a constant: it was fitted once, on one x86-64 CPU with MKL, and measures nothing where it runs. Per
    token dense costs ``outputs * inputs`` products, CSR about ten times as much per weight that is kept, and the
    transposing of inputs, outputs and their gradients besides, about as much as 80 products each. There, with 192
    to 512 tokens, at 1024 x 1024 CSR got faster at 90%, at 1024 x 256 at 92%, at 384 x 128 at 96%. The rule stays
    two hundredths on the dense side of that.
    """
    return kept / (outputs * inputs) <= 0.1 - 8 * (1 / outputs + 1 / inputs)


def csr_structure(mask: torch.Tensor) -> Structure:
    """List where a bool matrix ``[rows, columns]`` is True, in the order of rows.

    Returns:
        The first entry of each row, int32 ``[rows + 1]``; columns and places in the flattened matrix, int32 each.
    """
    rows, columns = mask.shape
    index = mask.reshape(-1).nonzero().squeeze(1)
    crow = torch.zeros(rows + 1, dtype=torch.int32, device=mask.device)
    crow[1:] = mask.sum(1).cumsum(0)
    return crow, (index % columns).int(), index.int()


def csr_linear(hidden: torch.Tensor, weight: torch.Tensor, structure: Structure, transposed: Structure) -> torch.Tensor:
    """Compute ``hidden @ weight.T`` by the weight's kept entries alone, forward and backward.

    Args:
        hidden: ``[..., inputs]``.
        weight: ``[outputs, inputs]``, contiguous. Its gradient is dense, 0 where nothing is kept.
        structure: of the kept entries, see :func:`csr_structure`.
        transposed: of the transpose; the last tensor says where its entries lie in the flattened weight.
    """
    result: torch.Tensor = _Csr.apply(hidden.reshape(-1, hidden.shape[-1]), weight, *structure, *transposed)
    return result.view(*hidden.shape[:-1], weight.shape[0])


def no_linear(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute ``hidden @ weight.T`` of a weight of which nothing is kept, without a product; gradients are 0 too."""
    result: torch.Tensor = _Nothing.apply(hidden, weight)
    return result


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.inputs = hidden.shape
        return hidden.new_zeros(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        to_hidden = gradient.new_zeros(ctx.inputs) if ctx.needs_input_grad[0] else None
        return to_hidden, torch.zeros_like(weight) if ctx.needs_input_grad[1] else None


class _Csr(torch.autograd.Function):
    """``Y = X W^T``: ``Y^T = W X^T``, ``dX^T = W^T dY^T``, ``dW = dY^T X`` at the kept places only (SDDMM).

    All three need ``X^T`` and ``dY^T`` in rows: each is transposed once.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, *structures: torch.Tensor) -> torch.Tensor:
        across = hidden.t().contiguous()
        ctx.save_for_backward(across, weight, *structures)
        crow, col, index = structures[:3]
        return (_csr(crow, col, _values(weight, index), weight.shape) @ across).t().contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        across, weight, crow, col, index, crow_transposed, col_transposed, index_transposed = ctx.saved_tensors
        gradient_across = gradient.t().contiguous()
        to_hidden = to_weight = None
        if ctx.needs_input_grad[0]:
            values = _values(weight, index_transposed)
            transposed = _csr(crow_transposed, col_transposed, values, weight.t().shape)
            to_hidden = (transposed @ gradient_across).t().contiguous()
        if ctx.needs_input_grad[1]:
            kept = _csr(crow, col, weight.new_zeros(len(index)), weight.shape)  # zeros: torch multiplies them by beta
            products = torch.sparse.sampled_addmm(kept, gradient_across, across.t(), beta=0.0).values()
            to_weight = torch.zeros_like(weight)
            to_weight.view(-1).index_copy_(0, index.long(), products)
        return to_hidden, to_weight, *[None] * 6


def _values(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return weight.view(-1).index_select(0, index)


def _csr(crow: torch.Tensor, col: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_csr_tensor(crow, col, values, shape, check_invariants=False)


def _can_csr(weight: torch.Tensor) -> bool:
    """Is CSR possible and measured here? torch has none in bf16 on the CPU; accelerators were not measured."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkl.is_available()
