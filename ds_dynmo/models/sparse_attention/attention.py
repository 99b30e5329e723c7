"""Dynamic sparse attention (paper, section 2): which pairs of tokens attend changes with every forward pass.

Two patterns of Pagliardini et al., "Faster causal attention over large sequences through sparse flash attention":
hash-sparse and QK-sparse, as in their code (github.com/epfml/dynamic-sparse-flash-attention). Keys are the normalised
queries, as in Reformer. Both are redrawn in every forward pass, in evaluation too, from torch's default generator.
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
    """Causal multi-head attention over a pattern that is drawn in every forward pass; keys are normalised queries.

    A token that has no pair gets zeros from its head.

    The pairs of the last training batch are counted for :meth:`load_signal`: a batch begins with a call of
    ``train()``, as DeepSpeed's ``train_batch`` does. What is recomputed for backward is counted in
    every micro-batch alike, which leaves the share as it is.

    Attributes:
        attended: pairs computed in the batch, int64 ``[]``; None before the first one.
        causal: pairs that dense causal attention has there.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = config.heads
        self.rope_base = config.rope_base
        self.input = init_linear(config.hidden_size, 2 * config.hidden_size, INIT_STD, generator)
        self.output = init_linear(config.hidden_size, config.hidden_size, residual_std(config), generator)
        self.attended: torch.Tensor | None = None
        self.causal = 0

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attend: ``[batch, sequence, hidden]`` to the same shape.

        Args:
            positions: int64 ``[sequence]`` or ``[batch, sequence]``, ascending: a token sees what stands before it.
        """
        batch, sequence, width = hidden.shape
        projected = self.input(hidden).view(batch, sequence, 2, self.heads, width // self.heads)
        query, value = projected.permute(2, 0, 3, 1, 4)
        query = apply_rotary(query, positions.unsqueeze(-2), self.rope_base)
        mixed, attended = self.attend(query, unit_keys(query), value)
        if self.training:
            self._count(attended, batch * self.heads * sequence * (sequence + 1) // 2)
        output: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return output

    @abstractmethod
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix values and count the pairs, int64 ``[]``; the others are ``[batch, heads, sequence, head width]``."""

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
    """Tokens attend to earlier tokens of their hash bucket, never to themselves (hash-sparse).

    A token's own key would always have its query's highest score, so it is left out: the first token of a bucket gets
    zeros. Buckets come from the rotated queries, whose products the scores are: two tokens whose score would be high
    share a bucket. Each head hashes by random directions of its own, alike for all sequences.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator, *, sparse: SparseAttentionConfig) -> None:
        super().__init__(config, generator)
        assert sparse.buckets is not None
        self.buckets = sparse.buckets

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`SparseAttention.attend`."""
        directions = torch.randn(self.heads, query.shape[-1], self.buckets // 2, device=query.device)
        buckets = hash_buckets(query, directions)
        mixed = bucket_attention(query, key, value, buckets, self.buckets)
        return mixed, bucket_pairs(buckets, self.buckets)


class QKSparseAttention(SparseAttention):
    """Queries and keys are dropped at random, per token and head; the kept ones attend causally (QK-sparse).

    A kept query attends to kept keys of earlier tokens and to its own, if that is kept. A dropped query gets zeros.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator, *, sparse: SparseAttentionConfig) -> None:
        super().__init__(config, generator)
        assert sparse.keep_queries is not None and sparse.keep_keys is not None
        self.keep_queries, self.keep_keys = sparse.keep_queries, sparse.keep_keys

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`SparseAttention.attend`."""
        drawn = torch.rand(2, *query.shape[:-1], device=query.device)
        keep_query, keep_key = drawn[0] < self.keep_queries, drawn[1] < self.keep_keys
        return kept_attention(query, key, value, keep_query, keep_key), kept_pairs(keep_query, keep_key)


def hash_buckets(query: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Hash each vector: which of the directions and their opposites it points to most, int64 ``[...]``.

    Locality-sensitive hashing for angles, ``argmax [x R; -x R]``; no gradient.

    Args:
        query: ``[..., width]``.
        directions: fp32 ``[..., width, buckets / 2]``, R; its columns are brought to length 1.
    """
    with torch.no_grad():
        products = query.float() @ nn.functional.normalize(directions, dim=-2)
        return torch.cat((products, -products), dim=-1).argmax(dim=-1)


def unit_keys(query: torch.Tensor) -> torch.Tensor:
    """Scale queries ``[..., width]`` to length 1, in fp32; zeros stay zeros."""
    exact = query.float()
    return (exact * (exact.square().sum(-1, keepdim=True) + KEY_EPS).rsqrt()).to(query.dtype)


def attention_parts(model: GPTConfig, config: SparseAttentionConfig, block_number: int) -> dict[str, Any]:
    """Return parts of block ``block_number``, counted from 1: arguments of :class:`~ds_dynmo.models.gpt.Block`."""
    attention = HashSparseAttention if config.pattern == "hash" else QKSparseAttention
    return {"attention": partial(attention, sparse=config)}
