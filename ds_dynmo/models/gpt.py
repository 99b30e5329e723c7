"""A decoder-only GPT as a list of pipeline layers: embedding, pre-norm blocks or their halves, final norm, output head.

Between layers there is one float tensor ``[batch, sequence, hidden]``, or what a
:class:`~ds_dynmo.models.stream.Stream` packs. Every layer draws its initial weights from a generator of its own, so
that they are the same under every partition of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.stream import Activations, Stream
from ds_dynmo.models.transformer import INIT_STD, CausalSelfAttention, FeedForward, init_normal

__all__ = [
    "AttentionHalf",
    "Block",
    "BlockPart",
    "BlockTypes",
    "FeedForwardHalf",
    "FinalNorm",
    "OutputHead",
    "TokenEmbedding",
    "block_layers",
    "embed",
    "gpt_layers",
    "language_model_loss",
    "language_model_losses",
]

MakePart = Callable[[Any, torch.Generator], nn.Module]  # from the configuration and the generator of its weights


class _Layer(nn.Module):
    """A layer of the pipeline."""

    def load_signal(self) -> float:
        """The paper's ``1 - f_i`` (section 2, layer freezing): 0.0 if no parameter of this layer trains, else 1.0.

        The paper counts a frozen layer as no load. It still runs forward, which a measured time includes and this
        number does not. A part that does less than its dense work says so by a ``load_signal`` of its own.
        """
        signal = float(any(parameter.requires_grad for parameter in self.parameters()))
        for part in self.children():
            share = getattr(part, "load_signal", None)
            signal *= share() if share is not None else 1.0
        return signal


class TokenEmbedding(_Layer):
    """Token numbers int64 ``[batch, sequence]`` to ``[batch, sequence, hidden]``, and what travels beside that.

    With :class:`~ds_dynmo.models.transformer.DocumentAttention` in the blocks it takes (token numbers, positions).
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.carries = config.carries
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        init_normal(self.weight, INIT_STD, generator_for("layer", config.seed, layer))

    def forward(self, tokens: Activations) -> Activations:
        return embed(self.weight, tokens, self.carries)


class BlockPart(_Layer):
    """A block or half of one: its parts, and how they change hidden states."""

    is_block: ClassVar[bool] = True

    attention_norm: nn.LayerNorm
    attention: nn.Module
    mlp_norm: nn.LayerNorm
    mlp: nn.Module

    def forward(self, activations: Activations) -> Activations:
        stream = Stream.unpack(activations)
        positions = stream.positions
        if positions is None:
            positions = torch.arange(stream.hidden.shape[1], device=stream.hidden.device)
        hidden, auxiliary = self.transform(stream.hidden, positions)
        if auxiliary is not None and stream.auxiliary is not None:
            auxiliary = stream.auxiliary + auxiliary
        return replace(stream, hidden=hidden, auxiliary=stream.auxiliary if auxiliary is None else auxiliary).pack()

    def transform(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply this layer to hidden states; give them and its auxiliary loss, None if it has none.

        Args:
            hidden: ``[batch, sequence, hidden]``, tokens in the order of their positions.
            positions: int64 ``[sequence]`` or ``[batch, sequence]``.
        """
        raise NotImplementedError

    def _make_attention(self, config: GPTConfig, attention: MakePart | None, generator: torch.Generator) -> None:
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = (attention or CausalSelfAttention)(config, generator)

    def _make_mlp(self, config: GPTConfig, mlp: MakePart | None, generator: torch.Generator) -> None:
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = (mlp or FeedForward)(config, generator)

    def _attend(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = hidden + self.attention(self.attention_norm(hidden), positions)
        return changed

    def _feed_forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        change = self.mlp(self.mlp_norm(hidden))
        change, auxiliary = change if isinstance(change, tuple) else (change, None)
        return hidden + change, auxiliary


class Block(BlockPart):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        layer: its number among the blocks, counted from 1.
        attention: makes the attention; called with normalised hidden states ``[batch, sequence, hidden]`` and
            positions, int64 ``[sequence]`` or ``[batch, sequence]``.
        mlp: makes the feed-forward part, which gives hidden states, or these and an auxiliary loss, fp32 ``[1]``.
    """

    def __init__(
        self, config: GPTConfig, layer: int, attention: MakePart | None = None, mlp: MakePart | None = None
    ) -> None:
        super().__init__()
        self.carries = config.carries
        generator = generator_for("layer", config.seed, layer)
        self._make_attention(config, attention, generator)
        self._make_mlp(config, mlp, generator)

    def transform(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`BlockPart.transform`."""
        return self._feed_forward(self._attend(hidden, positions))


class AttentionHalf(BlockPart):
    """``x + attention(norm(x))``: the first half of a :class:`Block`, with its weights under their names in it.

    Args:
        layer, attention: as in :class:`Block`.

    Attributes:
        draws_as_layer: the block's number among whole blocks, so that it draws random numbers as the block would.
    """

    def __init__(self, config: GPTConfig, layer: int, attention: MakePart | None = None) -> None:
        super().__init__()
        self.carries = config.carries
        self.draws_as_layer = layer
        self._make_attention(config, attention, generator_for("layer", config.seed, layer))

    def transform(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`BlockPart.transform`."""
        return self._attend(hidden, positions), None


class FeedForwardHalf(BlockPart):
    """``x + mlp(norm(x))``: the second half of a :class:`Block`, with its weights under their names in it.

    Args:
        layer, attention, mlp: as in :class:`Block`. The attention's weights are drawn and dropped, because those of
            the feed-forward part are drawn after them.

    Attributes:
        draws_as_layer: a number that no other layer has.
    """

    def __init__(
        self, config: GPTConfig, layer: int, attention: MakePart | None = None, mlp: MakePart | None = None
    ) -> None:
        super().__init__()
        self.carries = config.carries
        self.draws_as_layer = -layer
        generator = generator_for("layer", config.seed, layer)
        (attention or CausalSelfAttention)(config, generator)
        self._make_mlp(config, mlp, generator)

    def transform(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`BlockPart.transform`."""
        return self._feed_forward(hidden)


class FinalNorm(_Layer):
    """The norm before the head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, activations: Activations) -> Activations:
        stream = Stream.unpack(activations)
        return replace(stream, hidden=self.norm(stream.hidden)).pack()


class OutputHead(_Layer):
    """``[batch, sequence, hidden]`` to logits ``[batch, sequence, vocabulary]``, and the auxiliary losses if any."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        init_normal(self.weight, INIT_STD, generator_for("layer", config.seed, layer))

    def forward(self, activations: Activations) -> Activations:
        return _logits(self.weight, activations)


class BlockTypes(NamedTuple):
    """The classes of a block: of a whole one, and of its halves where they are layers (``split_blocks``)."""

    whole: type[BlockPart]
    attention_half: type[BlockPart]
    feed_forward_half: type[BlockPart]


PLAIN = BlockTypes(Block, AttentionHalf, FeedForwardHalf)


def block_layers(config: GPTConfig, number: int, types: BlockTypes = PLAIN, **parts: Any) -> list[LayerSpec]:
    """Specify block ``number``, counted from 1: one layer of the list, or one for each half.

    Args:
        parts: arguments of :class:`Block`, "attention" and "mlp", and of the classes in ``types``.
    """
    if not config.split_blocks:
        return [LayerSpec(types.whole, config, number, **parts)]
    of_attention = {name: part for name, part in parts.items() if name != "mlp"}
    return [
        LayerSpec(types.attention_half, config, number, **of_attention),
        LayerSpec(types.feed_forward_half, config, number, **parts),
    ]


def gpt_layers(config: GPTConfig, blocks: Sequence[LayerSpec] | None = None) -> list[LayerSpec]:
    """Build the layer list for a ``PipelineModule``: embedding, blocks or their halves, final norm, head.

    With ``tied_embedding`` the first and the last entry are one ``TiedLayerSpec`` key, "embedding".

    Args:
        blocks: what is between embedding and final norm; None: plain blocks, or their halves.
    """
    if blocks is None:
        blocks = [layer for number in range(1, config.layers + 1) for layer in block_layers(config, number)]
    if config.tied_embedding:
        # The head has the forward_fn: checkpoints hold the state of the tied layer that has none.
        embedding = TiedLayerSpec("embedding", TokenEmbedding, config, 0, tied_weight_attr="weight")
        head = TiedLayerSpec("embedding", TokenEmbedding, config, 0, forward_fn=_tied_logits, tied_weight_attr="weight")
    else:
        embedding = LayerSpec(TokenEmbedding, config, 0)
        head = LayerSpec(OutputHead, config, config.layers + 2)
    return [embedding, *blocks, LayerSpec(FinalNorm, config), head]


def language_model_loss(outputs: Activations, labels: torch.Tensor) -> torch.Tensor:
    """Compute the loss that is trained: the sum of :func:`language_model_losses`."""
    loss, auxiliary = language_model_losses(outputs, labels)
    return loss if auxiliary is None else loss + auxiliary


def language_model_losses(outputs: Activations, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the mean cross entropy in nats, in fp32, and what training adds to it, None if that is nothing.

    Args:
        outputs: logits ``[batch, sequence, vocabulary]``, or them and the sum of the auxiliary losses, ``[1]``, or also
            the weight ``w`` of the cross entropy, ``[1]``, where auxiliary losses are weighted with it. What is added
            is then their sum less ``1 - w`` times the cross entropy.
        labels: int64 ``[batch, sequence]``.
    """
    logits, auxiliary, *weight = outputs if isinstance(outputs, tuple) else (outputs, None)
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    if auxiliary is None:
        return loss, None
    added = auxiliary.squeeze()
    return loss, added - (1 - weight[0].squeeze()) * loss if weight else added


def embed(weight: torch.Tensor, tokens: Activations, carries: str) -> Activations:
    """Look ``tokens`` up in ``weight``, and add what travels beside hidden states: ``carries``, positions if any."""
    ids, positions = tokens if isinstance(tokens, tuple) else (tokens, None)
    hidden = F.embedding(ids, weight)
    auxiliary = torch.zeros(1, device=ids.device) if carries != "hidden" else None
    if carries == "exits":
        return Stream(hidden, auxiliary, ids, torch.zeros_like(ids)).pack()
    return Stream(hidden, auxiliary, positions=positions).pack()


def _tied_logits(embedding: TokenEmbedding, activations: Activations) -> Activations:
    return _logits(embedding.weight, activations)


def _logits(weight: torch.Tensor, activations: Activations) -> Activations:
    stream = Stream.unpack(activations)
    logits = F.linear(stream.hidden, weight)
    return logits if stream.auxiliary is None else (logits, stream.auxiliary)
