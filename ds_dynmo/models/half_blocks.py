"""The halves of a block as layers of their own (``split_blocks``): more places where a partition can cut.

They compute and draw what the whole block would, with its weights under their names in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_dynmo.models.gpt import Block, CausalSelfAttention, FeedForward, GPTLayer, MakePart
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.seeding import generator_for

__all__ = ["AttentionHalf", "BlockTypes", "FeedForwardHalf", "block_layers"]


class AttentionHalf(Block):
    """``x + attention(norm(x))``: the first half of a :class:`~ds_dynmo.models.gpt.Block`.

    Args:
        block_number, attention: as in :class:`~ds_dynmo.models.gpt.Block`.

    Attributes:
        draws_as_layer: the block's number among whole blocks, so that it draws random numbers as the block would.
    """

    def __init__(self, config: GPTConfig, block_number: int, attention: MakePart | None = None) -> None:
        GPTLayer.__init__(self)
        self.draws_as_layer = block_number
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = (attention or CausalSelfAttention)(config, generator_for("layer", config.seed, block_number))

    def transform(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`ds_dynmo.models.gpt.Block.transform`."""
        return self.attend(hidden, positions), None


class FeedForwardHalf(Block):
    """``x + mlp(norm(x))``: the second half of a :class:`~ds_dynmo.models.gpt.Block`.

    Args:
        block_number, attention, mlp: as in :class:`~ds_dynmo.models.gpt.Block`. The attention's weights are drawn and
            dropped, because those of the feed-forward part are drawn after them.

    Attributes:
        draws_as_layer: a number that no other layer has.
    """

    def __init__(
        self, config: GPTConfig, block_number: int, attention: MakePart | None = None, mlp: MakePart | None = None
    ) -> None:
        GPTLayer.__init__(self)
        self.draws_as_layer = -block_number
        generator = generator_for("layer", config.seed, block_number)
        (attention or CausalSelfAttention)(config, generator)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = (mlp or FeedForward)(config, generator)

    def transform(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`ds_dynmo.models.gpt.Block.transform`."""
        return self.feed_forward(hidden)


class BlockTypes(NamedTuple):
    """The classes of a block: of a whole one, and of its halves where they are layers."""

    whole: type[Block]
    attention_half: type[Block]
    feed_forward_half: type[Block]


PLAIN = BlockTypes(Block, AttentionHalf, FeedForwardHalf)


def block_layers(config: GPTConfig, block_number: int, types: BlockTypes = PLAIN, **parts: Any) -> list[LayerSpec]:
    """Specify block ``block_number``, counted from 1: one layer of the list, or one for each half.

    Args:
        parts: arguments of :class:`~ds_dynmo.models.gpt.Block`, "attention" and "mlp", and of the classes in ``types``.
    """
    if not config.split_blocks:
        return [LayerSpec(types.whole, config, block_number, **parts)]
    of_attention = {name: part for name, part in parts.items() if name != "mlp"}
    return [
        LayerSpec(types.attention_half, config, block_number, **of_attention),
        LayerSpec(types.feed_forward_half, config, block_number, **parts),
    ]
