"""Measure from what sparsity on CSR is faster than a dense product, on the machine at hand.

The result is one of :data:`SPARSITIES` per shape of a weight and dtype. A process measures each once.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import torch

from ds_dynmo.models.pruning.kernels import CSR, DENSE, Kernel, Shape, can_csr, compressed_linear
from ds_dynmo.models.pruning.magnitude import Linears, Sum
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear

__all__ = ["SPARSITIES", "agree_on_csr", "csr_is_faster_from"]

SPARSITIES = (0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 1.0)  # at 1.0 no product is left: never
TOKENS = 256  # of a measured pass
PASSES = 5  # of each kernel, in turns; the fastest counts: what else the machine does only slows them

Measure = Callable[[Shape, torch.dtype, torch.device], float]


@cache
def csr_is_faster_from(shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    """Measure from which of :data:`SPARSITIES` on CSR is faster than dense, forward and backward.

    It bisects them: the sparser the weight, the faster its kept values alone.

    Args:
        shape: of the weight, ``(outputs, inputs)``.
    """
    if not can_csr(dtype, device):
        return SPARSITIES[-1]
    return SPARSITIES[
        bisect_left(SPARSITIES[:-1], True, key=lambda sparsity: _csr_is_faster(shape, sparsity, dtype, device))
    ]


def _csr_is_faster(shape: Shape, sparsity: float, dtype: torch.dtype, device: torch.device) -> bool:
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(outputs, inputs, generator=generator) >= sparsity
    index = keep.flatten().nonzero().squeeze(1).int().to(device)
    hidden = torch.randn(TOKENS, inputs, generator=generator).to(device, dtype).requires_grad_()
    values = torch.randn(len(index), generator=generator).to(device, dtype).requires_grad_()

    def seconds(kernel: Kernel) -> float:
        _synchronize(device)
        began = time.perf_counter()
        outcome = compressed_linear(hidden, values, index, shape, kernel)
        torch.autograd.grad(outcome, (hidden, values), outcome.detach())
        _synchronize(device)
        return time.perf_counter() - began

    passes = [(seconds(CSR), seconds(DENSE)) for _ in range(PASSES + 1)][1:]  # the first warms up
    return min(csr for csr, _ in passes) < min(dense for _, dense in passes)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def agree_on_csr(
    linears: Linears, *, num_layers: int, sum_over_world: Sum, measure: Measure = csr_is_faster_from
) -> None:
    """Set ``measured_csr_from`` of all linear layers that lack it and ``csr_from``: alike for alike shapes. Collective.

    Of what ranks measured the highest counts. Nothing is measured if no rank has such a layer.

    Args:
        linears: of this stage, by layer number.
        num_layers: of the model.
        sum_over_world: adds a CPU float64 tensor over all ranks.
        measure: what stands in for :func:`csr_is_faster_from`.
    """
    sizes = torch.zeros(num_layers, 2, dtype=torch.float64)
    for layer, members in linears.items():
        unknown = any(linear.csr_from is None and linear.measured_csr_from is None for linear in members)
        sizes[layer] = torch.tensor([len(members) * unknown, 1.0])
    sizes = sum_over_world(sizes)
    most = int((sizes[:, 0] / sizes[:, 1].clamp(min=1)).max())
    if not most:
        return
    table = torch.zeros(num_layers, most, 3 + len(SPARSITIES), dtype=torch.float64)
    for layer, members in linears.items():
        for row, linear in zip(table[layer], members):
            row[:3] = torch.tensor([1.0, *linear.shape])
            row[3 + SPARSITIES.index(_found(linear, measure))] = 1.0
    chosen = _highest(sum_over_world(table))
    for linear in (linear for members in linears.values() for linear in members):
        if linear.csr_from is None and linear.measured_csr_from is None:
            linear.measured_csr_from = chosen[linear.shape]


def _found(linear: PrunableLinear, measure: Measure) -> float:
    if linear.csr_from is not None:
        return SPARSITIES[0]  # counts for none: it is not measured
    if linear.measured_csr_from is not None:
        return linear.measured_csr_from
    return measure(linear.shape, linear.weight.dtype, linear.weight.device)


def _highest(table: torch.Tensor) -> dict[Shape, float]:
    """Read, per shape, the highest sparsity that a rank found."""
    chosen: dict[Shape, float] = {}
    for ranks, outputs, inputs, *votes in table.flatten(0, 1).tolist():
        if ranks:
            shape = int(outputs / ranks), int(inputs / ranks)
            highest = max(sparsity for sparsity, vote in zip(SPARSITIES, votes) if vote)
            chosen[shape] = max(chosen.get(shape, 0.0), highest)
    return chosen
