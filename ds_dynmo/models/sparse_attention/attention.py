"""Dynamic sparse attention (paper, section 2): which pairs of tokens attend changes with every forward pass.

Two patterns of Pagliardini et al., "Faster causal attention over large sequences through sparse flash attention":
hash-sparse and QK-sparse. Both are redrawn in every forward pass, in evaluation too, from torch's default
generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from torch import nn

from ds_dynmo.models.batch_counts import CountsPerBatch
from ds_dynmo.models.sparse_attention.kernels import bucket_attention, bucket_pairs, kept_attention, kept_pairs
from ds_dynmo.models.transformer import INIT_STD, apply_rotary, init_linear, residual_std

__all__ = [
    "HashSparseAttention",
    "QKSparseAttention",
    "SparseAttention",
    "SparseAttentionConfig",
    "hash_buckets",
    "unit_keys",
]

KEY_EPS = 1e-6  # added to a query's squared norm, so that a query of zeros has a key and a gradient


class SparseAttentionConfig(BaseModel):
    """The "sparse_attention" block."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    kind: Literal["hash", "qk"] = Field(description='"hash": within hash buckets; "qk": kept queries over kept keys')
    buckets: int | None = Field(
        default=None, ge=2, validate_default=True, description='hash buckets, an even number; "hash" only, default 16'
    )
    keep_queries: float | None = Field(
        default=None, gt=0, le=1, validate_default=True, description='probability to keep; "qk" only, default 0.5'
    )
    keep_keys: float | None = Field(
        default=None, gt=0, le=1, validate_default=True, description='probability to keep; "qk" only, default 0.5'
    )

    @field_validator("buckets")
    @classmethod
    def _even_with_hash(cls, buckets: int | None, info: ValidationInfo) -> int | None:
        buckets = _of_kind("hash", buckets, 16, info)
        if buckets is not None and buckets % 2:
            raise ValueError("should be even: half of them are the other half's opposites")
        return buckets

    @field_validator("keep_queries", "keep_keys")
    @classmethod
    def _with_qk(cls, keep: float | None, info: ValidationInfo) -> float | None:
        return _of_kind("qk", keep, 0.5, info)


def _of_kind(kind: str, value: Any, default: Any, info: ValidationInfo) -> Any:
    """Give a setting of ``kind`` its default, and refuse it for the other kind."""
    if "kind" not in info.data:  # it is invalid
        return value
    if info.data["kind"] == kind:
        return default if value is None else value
    if value is not None:
        raise ValueError(f'is for kind "{kind}", this is "{info.data["kind"]}"')
    return None


class SparseAttention(CountsPerBatch, ABC):
    """Causal multi-head self-attention over a pattern that is drawn in every forward pass.

    The pairs of the last training batch are counted for :meth:`load_signal`: a batch begins with a call of
    ``train()``, as DeepSpeed's ``train_batch`` does. What is recomputed for backward is counted in
    every micro-batch alike, which leaves the share as it is.

    Attributes:
        attended: pairs computed in the batch, int64 ``[]``; None before the first one.
        causal: pairs that dense causal attention has there.
    """

    def __init__(self, config: Any, generator: torch.Generator, projections: int) -> None:
        super().__init__()
        self.heads: int = config.heads
        self.rope_base: float = config.rope_base
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
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, width))

    @abstractmethod
    def attend(self, projected: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix values, ``[batch, heads, sequence, head width]``, and count the pairs, int64 ``[]``.

        Args:
            projected: ``[projections, batch, heads, sequence, head width]``.
            positions: int64 ``[1, sequence]`` or ``[batch, 1, sequence]``.
        """

    def load_signal(self) -> float:
        """The paper's ``s_i`` (section 2): the share of the causal attention matrix that is not zero.

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

    def __init__(self, config: Any, generator: torch.Generator) -> None:
        super().__init__(config, generator, projections=2)
        self.buckets: int = config.sparse_attention.buckets

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

    def __init__(self, config: Any, generator: torch.Generator) -> None:
        super().__init__(config, generator, projections=3)
        self.keep_queries: float = config.sparse_attention.keep_queries
        self.keep_keys: float = config.sparse_attention.keep_keys

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
