"""Dynamic sparse attention (paper, section 2): which pairs of tokens attend changes with every forward pass.

Two patterns of Pagliardini et al., "Faster causal attention over large sequences through sparse flash attention":
hash-sparse and QK-sparse. Both are redrawn in every forward pass, in evaluation too, from torch's default
generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_dynmo.models.batch_counts import CountsPerBatch
from ds_dynmo.models.gpt import INIT_STD, apply_rotary, init_linear, residual_std
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.sparse_attention.config import SparseAttentionConfig
from ds_dynmo.models.sparse_attention.kernels import bucket_attention, bucket_pairs, kept_attention, kept_pairs

__all__ = [
    "HashSparseAttention",
    "QKSparseAttention",
    "SparseAttention",
    "attention_parts",
    "hash_buckets",
    "unit_keys",
]

KEY_EPS = 1e-6  # added to a query's squared norm, so that a query of zeros has a key and a gradient


class SparseAttention(CountsPerBatch, ABC):
    """Causal multi-head self-attention over a pattern that is drawn in every forward pass.

    The pairs of the last training batch are counted for :meth:`load_signal`: a batch begins with a call of
    ``train()``, as DeepSpeed's ``train_batch`` does. What is recomputed for backward is counted in
    every micro-batch alike, which leaves the share as it is.

    Attributes:
        attended: pairs computed in the batch, int64 ``[]``; None before the first one.
        causal: pairs that dense causal attention has there.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator, projections: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.rope_base = config.rope_base
        self.input = init_linear(config.hidden_size, projections * config.hidden_size, INIT_STD, generator)
        self.output = init_linear(config.hidden_size, config.hidden_size, residual_std(config), generator)
        self.attended: torch.Tensor | None = None
        self.causal = 0

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attend: ``[batch, sequence, hidden]`` to the same shape.

        Args:
            positions: int64 ``[sequence]`` or ``[batch, sequence]``, ascending: a token sees what stands before it.
        """
        batch, sequence, width = hidden.shape
        projected = self.input(hidden).view(batch, sequence, -1, self.heads, width // self.heads)
        mixed, attended = self.attend(projected.permute(2, 0, 3, 1, 4), positions.unsqueeze(-2))
        if self.training:
            self._count(attended, batch * self.heads * sequence * (sequence + 1) // 2)
        output: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return output

    @abstractmethod
    def attend(self, projected: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix values, ``[batch, heads, sequence, head width]``, and count the pairs, int64 ``[]``.

        Args:
            projected: ``[projections, batch, heads, sequence, head width]``.
            positions: int64 ``[1, sequence]`` or ``[batch, 1, sequence]``.
        """

    def load_signal(self) -> float:
        """Return the paper's ``s_i`` (section 2): the share of the causal attention matrix that is not zero.

        A mean over the micro-batches of the last training batch. 1.0 before the first.
        """
        return 1.0 if self.attended is None else int(self.attended) / self.causal

    def _count(self, attended: torch.Tensor, causal: int) -> None:
        if self.begins_batch() or self.attended is None:
            self.attended, self.causal = torch.zeros_like(attended), 0
        self.attended = self.attended + attended
        self.causal += causal


class HashSparseAttention(SparseAttention):
    """Tokens attend to themselves and to earlier tokens of their hash bucket (hash-sparse).

    Keys are the normalised queries, as in Reformer, so that a token's query and key are in one bucket. A token's own
    key always has the highest score there; it takes part like any other, which leaves no row empty. Buckets come from
    the rotated queries, whose products the scores are: two tokens whose score would be high share a bucket. All heads
    hash by the same random directions.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator, *, sparse: SparseAttentionConfig) -> None:
        super().__init__(config, generator, projections=2)
        assert sparse.buckets is not None
        self.buckets = sparse.buckets

    def attend(self, projected: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as :meth:`SparseAttention.attend` says."""
        query, value = projected
        query = apply_rotary(query, positions, self.rope_base)
        directions = torch.randn(query.shape[-1], self.buckets // 2, device=query.device)
        buckets = hash_buckets(query, directions)
        mixed = bucket_attention(query, unit_keys(query), value, buckets, self.buckets)
        return mixed, bucket_pairs(buckets, self.buckets)


class QKSparseAttention(SparseAttention):
    """Queries and keys are dropped at random, per token and head; the kept ones attend causally (QK-sparse).

    Every token attends to itself besides, kept or not: a dropped query gives its own value, and a kept one never
    finds itself without a key. Positions are those of the tokens, not of the kept ones among themselves.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator, *, sparse: SparseAttentionConfig) -> None:
        super().__init__(config, generator, projections=3)
        assert sparse.keep_queries is not None and sparse.keep_keys is not None
        self.keep_queries, self.keep_keys = sparse.keep_queries, sparse.keep_keys

    def attend(self, projected: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as :meth:`SparseAttention.attend` says."""
        query, key, value = projected
        query, key = (apply_rotary(states, positions, self.rope_base) for states in (query, key))
        drawn = torch.rand(2, *query.shape[:-1], device=query.device)
        keep_query, keep_key = drawn[0] < self.keep_queries, drawn[1] < self.keep_keys
        return kept_attention(query, key, value, keep_query, keep_key), kept_pairs(keep_query, keep_key)


def hash_buckets(query: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Hash each vector: which of the directions and their opposites it points to most, int64 ``[...]``.

    Locality-sensitive hashing for angles, ``argmax [x R; -x R]``; no gradient.

    Args:
        query: ``[..., width]``.
        directions: fp32 ``[width, buckets / 2]``, R; its columns are brought to length 1.
    """
    with torch.no_grad():
        products = query.float() @ nn.functional.normalize(directions, dim=0)
        return torch.cat((products, -products), dim=-1).argmax(dim=-1)


def unit_keys(query: torch.Tensor) -> torch.Tensor:
    """Scale queries ``[..., width]`` to length 1, in fp32; zeros stay zeros."""
    exact = query.float()
    return (exact * (exact.square().sum(-1, keepdim=True) + KEY_EPS).rsqrt()).to(query.dtype)


def attention_parts(model: GPTConfig, config: SparseAttentionConfig, block_number: int) -> dict[str, Any]:
    """Return parts of block ``block_number``, counted from 1: arguments of :class:`~ds_dynmo.models.gpt.Block`."""
    attention = HashSparseAttention if config.pattern == "hash" else QKSparseAttention
    return {"attention": partial(attention, sparse=config)}
