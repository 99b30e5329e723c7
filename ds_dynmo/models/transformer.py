"""The parts of a transformer block: causal attention, a feed-forward network, and how their weights are drawn."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import skip_init

from ds_dynmo.models.gpt_config import GPTConfig

__all__ = [
    "INIT_STD",
    "CausalSelfAttention",
    "DocumentAttention",
    "FeedForward",
    "apply_rotary",
    "init_linear",
    "init_normal",
    "residual_std",
]

INIT_STD = 0.02  # GPT-2


class CausalSelfAttention(nn.Module):
    """Multi-head attention of every token to itself and to earlier ones, with rotary positions."""

    def __init__(self, config: GPTConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = config.heads
        self.rope_base = config.rope_base
        self.query_key_value = init_linear(config.hidden_size, 3 * config.hidden_size, INIT_STD, generator)
        self.output = init_linear(config.hidden_size, config.hidden_size, residual_std(config), generator)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.output(self.mix(hidden, positions))
        return output

    def mix(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute what the output projection gets, ``[batch, sequence, hidden]``."""
        batch, sequence, width = hidden.shape
        projected = self.query_key_value(hidden).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mask = self.mask(positions)
        positions = positions.unsqueeze(-2)  # alike for all heads
        query = apply_rotary(query, positions, self.rope_base)
        key = apply_rotary(key, positions, self.rope_base)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return mixed.transpose(1, 2).reshape(batch, sequence, width)

    def mask(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Give what is attended to, bool ``[batch, 1, sequence, sequence]``; None: what is not later."""
        return None


class DocumentAttention(CausalSelfAttention):
    """Attention of every token to itself and to earlier ones of its document, which begins at position 0."""

    def mask(self, positions: torch.Tensor) -> torch.Tensor | None:
        """See :class:`CausalSelfAttention`."""
        documents = (positions == 0).cumsum(dim=-1)
        return (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril().unsqueeze(1)


class FeedForward(nn.Module):
    """Two linear layers with a GELU in between."""

    def __init__(self, config: GPTConfig, generator: torch.Generator) -> None:
        super().__init__()
        width = config.mlp_ratio * config.hidden_size
        self.expand = init_linear(config.hidden_size, width, INIT_STD, generator)
        self.contract = init_linear(width, config.hidden_size, residual_std(config), generator)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.contract(F.gelu(self.expand(hidden)))


def apply_rotary(states: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate pairs of features by angles that grow with the position (RoPE), in fp32.

    Args:
        states: ``[..., sequence, width]``, an even width; feature ``i`` is paired with ``i + width / 2``.
        positions: ints, broadcastable to ``[..., sequence]``.
        base: pair ``i`` turns by ``base ** (-2 i / width)`` per position.

    Returns:
        The same shape and dtype. The dot product of two rotated vectors depends on their positions' difference alone.
    """
    half = states.shape[-1] // 2
    frequencies = base ** (torch.arange(half, device=states.device, dtype=torch.float32) / -half)
    angles = positions.unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)


def init_linear(inputs: int, outputs: int, std: float, generator: torch.Generator) -> nn.Linear:
    """Make a linear layer without bias, its weight drawn from ``generator``."""
    linear = skip_init(nn.Linear, inputs, outputs, bias=False)  # nn.Linear's own initialisation draws globally
    init_normal(linear.weight, std, generator)
    return linear


def init_normal(weight: nn.Parameter, std: float, generator: torch.Generator) -> None:
    """Draw ``weight`` from ``generator``: normal, mean 0."""
    nn.init.normal_(weight, std=std, generator=generator)


def residual_std(config: GPTConfig) -> float:
    """Give the initial standard deviation of what is added to the residual stream: it shrinks with depth (GPT-2)."""
    return INIT_STD / math.sqrt(2 * config.layers)
