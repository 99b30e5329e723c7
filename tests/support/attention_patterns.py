"""Patterns of sparse attention, and attention in them that is computed densely."""

from __future__ import annotations

import math

import torch

from ds_dynmo.models.seeding import generator_for

BUCKETS = 6
SHAPE = (2, 3, 150, 16)  # batch, heads, sequence, width
MOST_BUCKETS = SHAPE[2]  # a bucket for each token


def states(seed: str = "states") -> list[torch.Tensor]:
    """Make query, key and value, which need gradients."""
    generator = generator_for(seed)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64).float().requires_grad_() for _ in range(3)]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attends: torch.Tensor) -> torch.Tensor:
    """Compute attention in the pattern ``attends``; a row without a pair is zeros."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~attends, -1e30).softmax(dim=-1)
    return weights.masked_fill(~attends.any(dim=-1, keepdim=True), 0.0) @ value


def bucket_pattern(buckets: torch.Tensor) -> torch.Tensor:
    earlier = torch.ones(buckets.shape[-1], buckets.shape[-1], dtype=torch.bool).tril(-1)
    return (buckets[..., :, None] == buckets[..., None, :]) & earlier


def kept_pattern(keep_query: torch.Tensor, keep_key: torch.Tensor) -> torch.Tensor:
    until = torch.ones(keep_query.shape[-1], keep_query.shape[-1], dtype=torch.bool).tril()
    return keep_query[..., :, None] & keep_key[..., None, :] & until


def bucket_assignments() -> dict[str, torch.Tensor]:
    generator = generator_for("buckets")
    rows = SHAPE[:3]
    uneven = torch.randint(0, BUCKETS**2, rows, generator=generator).float().sqrt().long()
    return {
        "random": torch.randint(0, BUCKETS, rows, generator=generator),
        "uneven": uneven,
        "all in one": torch.full(rows, 4),
        "the first and the last alone": torch.randint(0, 2, rows, generator=generator) * (BUCKETS - 1),
        "one token apart": torch.zeros(rows, dtype=torch.int64).index_fill(2, torch.tensor([77]), 3),
        "each token alone": torch.arange(rows[2]).expand(rows).contiguous(),
    }


def keeps() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    rows = SHAPE[:3]
    generator = generator_for("keeps")
    some = torch.rand(rows, generator=generator) < 0.5
    few = torch.rand(rows, generator=generator) < 0.1
    every, none = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    one_head_empty = some.index_fill(1, torch.tensor([1]), False)
    return {
        "random": (some, few),
        "few queries": (few, some),
        "all": (every, every),
        "no query": (none, some),
        "no key": (some, none),
        "nothing": (none, none),
        "a head without": (one_head_empty, one_head_empty),
    }
