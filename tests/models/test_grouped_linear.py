"""Products of all groups in one call equal those of a linear layer per group, wherever the operands lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_dynmo.models.moe import grouped_linear as module
from ds_dynmo.models.moe.grouped_linear import grouped_linear

COUNTS = [5, 0, 9, 1, 0, 17]


def drawn(dtype: torch.dtype, offset: int, *shape: int) -> torch.Tensor:
    """Return random values that begin ``offset`` elements after an aligned place."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(torch.Size(shape).numel(), generator=generator).to(dtype)
    return torch.cat([values[:offset], values])[offset:].view(shape).requires_grad_()  # cat's result is aligned


def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the operands of each call."""
    seen: list[tuple[Any, ...]] = []
    kernel = F.grouped_mm
    monkeypatch.setattr(module.F, "grouped_mm", lambda *args, **named: (seen.append(args), kernel(*args, **named))[1])
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_and_gradients_are_those_of_a_linear_layer_per_group(dtype: torch.dtype) -> None:
    for counts in (COUNTS, [32, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]):
        rows, weight = drawn(dtype, 0, sum(counts), 16), drawn(dtype, 0, len(counts), 24, 16)
        expected = torch.cat([F.linear(part, each) for part, each in zip(rows.split(counts), weight)])
        made, gradient = grouped_linear(rows, weight, counts), drawn(dtype, 0, sum(counts), 24).detach()
        found, wanted = (
            (output, *torch.autograd.grad(output, (rows, weight), gradient)) for output in (made, expected)
        )
        for outputs in zip(found, wanted, strict=True):
            torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("frozen", ["rows", "weight"])
def test_gradients_that_nobody_asks_for_are_not_computed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = {"rows": drawn(torch.float32, 0, 32, 16), "weight": drawn(torch.float32, 0, 6, 8, 16)}
    operands[frozen].requires_grad_(False)
    made, seen = grouped_linear(*operands.values(), COUNTS), calls(monkeypatch)
    made.sum().backward()
    assert len(seen) == 1


def test_operands_that_lie_anywhere_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, found = calls(monkeypatch), []
    for offset in (0, 1):
        rows, weight = drawn(torch.float32, offset, 32, 16), drawn(torch.float32, offset, 6, 24, 16)
        made = grouped_linear(rows, weight, COUNTS)
        found.append([made, *torch.autograd.grad(made, (rows, weight), drawn(torch.float32, offset, 32, 24))])
    assert all(operand.data_ptr() % 16 == 0 for call in seen for operand in call) and len(seen) == 6
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_an_expanded_gradient() -> None:
    rows, weight = torch.randn(32, 16, requires_grad=True), torch.randn(6, 8, 16, requires_grad=True)
    grouped_linear(rows, weight, COUNTS).sum().backward()
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad[5:14], weight[2].sum(0).expand(9, 16))


def test_operands_pass_the_checks_of_the_cuda_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "meta" checks shapes, strides and dtypes as CUDA does, and computes nothing."""
    seen = calls(monkeypatch)
    rows = torch.empty(sum(COUNTS), 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(len(COUNTS), 24, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    made = module._GroupedLinear.apply(rows, weight, COUNTS)  # there is no autocast for "meta"
    of_rows, of_weight = torch.autograd.grad(made, (rows, weight), torch.empty_like(made))
    assert (made.shape, of_rows.shape, of_weight.shape) == ((32, 24), rows.shape, weight.shape)
    assert [[operand.shape for operand in call] for call in seen] == [
        [(32, 16), (6, 16, 24)],
        [(32, 24), (6, 24, 16)],
        [(24, 32), (32, 16)],
    ]
