"""Outputs and gradients of FlexAttention and grouped products equal those of the dense computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_dynmo.models.moe.grouped_linear import grouped_linear
from ds_dynmo.models.sparse_attention.kernels import bucket_attention, kept_attention
from tests.accelerator.devices import ACCELERATOR, needs
from tests.support.attention_patterns import (
    MOST_BUCKETS,
    bucket_assignments,
    bucket_pattern,
    dense,
    keeps,
    kept_pattern,
    states,
)


def on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to(ACCELERATOR.current_device_name()).requires_grad_() for tensor in tensors]


def check(made: torch.Tensor, given: list[torch.Tensor], expected: torch.Tensor, dense_given: list[Any]) -> None:
    weights = torch.linspace(-1.0, 1.0, made.numel()).reshape(made.shape)
    found = torch.autograd.grad((made * weights.to(made.device)).sum(), given, materialize_grads=True)
    wanted = torch.autograd.grad((expected * weights).sum(), dense_given, materialize_grads=True)
    for mine, reference in zip([made, *found], [expected, *wanted], strict=True):
        torch.testing.assert_close(mine.cpu(), reference, atol=2e-3, rtol=2e-3)


@needs(1)
@pytest.mark.parametrize("name", bucket_assignments())
def test_flex_equals_bucket_attention(name: str) -> None:
    buckets, reference = bucket_assignments()[name], states()
    given = on_device(reference)
    made = bucket_attention(*given, buckets.to(given[0].device), MOST_BUCKETS)
    check(made, given, dense(*reference, bucket_pattern(buckets)), reference)


@needs(1)
@pytest.mark.parametrize("name", keeps())
def test_flex_equals_kept_attention(name: str) -> None:
    kept, reference = keeps()[name], states()
    given = on_device(reference)
    made = kept_attention(*given, *(keep.to(given[0].device) for keep in kept))
    check(made, given, dense(*reference, kept_pattern(*kept)), reference)


@needs(1)
def test_grouped_products_equal_dense_ones() -> None:
    counts = [3, 0, 5]
    generator = torch.Generator().manual_seed(0)
    reference = [
        torch.randn(8, 8, generator=generator).requires_grad_(),
        torch.randn(3, 4, 8, generator=generator).requires_grad_(),
    ]
    parts = zip(reference[0].split(counts), reference[1])
    expected = torch.cat([F.linear(rows, weight) for rows, weight in parts])
    given = on_device(reference)
    check(grouped_linear(*given, counts), given, expected, reference)


@needs(1)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("counts", [[3, 0, 5, 120], [0, 0, 1, 0], [64, 64, 64, 64]])
def test_grouped_products_in_bf16_equal_a_loop(counts: list[int], offset: int) -> None:
    """Operands may lie at any place, and groups may have no rows."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(torch.Size(shape).numel() + offset, generator=generator).bfloat16()
        on_device = values.to(ACCELERATOR.current_device_name())
        return on_device[offset:].view(shape).requires_grad_()

    rows, weight, towards = drawn(sum(counts), 64), drawn(len(counts), 128, 64), drawn(sum(counts), 128)
    made = grouped_linear(rows, weight, counts)
    found = torch.autograd.grad(made, (rows, weight), towards)
    reference = [tensor.detach().float().requires_grad_() for tensor in (rows, weight)]
    parts = zip(reference[0].split(counts), reference[1])
    expected = torch.cat([F.linear(part, matrix) for part, matrix in parts])
    wanted = torch.autograd.grad(expected, reference, towards.detach().float())
    for mine, exact in zip([made, *found], [expected, *wanted], strict=True):
        torch.testing.assert_close(mine.float(), exact, atol=0.1, rtol=2e-2)
    assert not any(found[1][group].any() for group, count in enumerate(counts) if not count)
