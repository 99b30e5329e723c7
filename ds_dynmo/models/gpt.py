"""A decoder-only GPT as a list of pipeline layers: embedding, pre-norm blocks, final norm, output head.

Between layers there is one float tensor ``[batch, sequence, hidden]``, or what a
:class:`~ds_dynmo.models.stream.Stream` packs. Every layer draws its initial weights from a generator of its own, so
that they are the same under every partition of the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.nn.utils import skip_init

from ds_dynmo.models.batch_counts import CountsPerBatch
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.stream import Activations, Labels, Stream
from ds_dynmo.models.vocabulary import NO_LABEL

__all__ = [
    "INIT_STD",
    "Block",
    "CausalSelfAttention",
    "DocumentAttention",
    "Ends",
    "FeedForward",
    "FinalNorm",
    "MakePart",
    "OutputHead",
    "TokenEmbedding",
    "apply_rotary",
    "embed",
    "gpt_layers",
    "init_linear",
    "init_normal",
    "language_model_loss",
    "language_model_losses",
    "residual_std",
]

INIT_STD = 0.02  # GPT-2
DRAWN_ROWS = 256  # of a matrix of the vocabulary, drawn by one generator: all where tokens are bytes

Ends = tuple[list[LayerSpec], list[LayerSpec]]  # the layers of the embedding, and those of the head
MakePart = Callable[[Any, torch.Generator], nn.Module]  # from the configuration and the generator of its weights


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
        """Compute the input of the output projection, ``[batch, sequence, hidden]``."""
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
        """Return the pairs that attend, bool ``[batch, 1, sequence, sequence]``; None: all to no later token."""
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
        contracted: torch.Tensor = self.contract(F.gelu(self.expand(hidden)))
        return contracted


class GPTLayer(nn.Module):
    """Base of the layers of the pipeline."""

    def load_signal(self) -> float:
        """Return the paper's ``1 - f_i`` (section 2, layer freezing): 0.0 if no parameter trains, else 1.0.

        The paper counts a frozen layer as no load. It still runs forward, which a measured time includes and this
        number does not. It is multiplied by the ``load_signal`` of each part that has one: the share of its dense work.
        """
        signal = float(any(parameter.requires_grad for parameter in self.parameters()))
        for part in self.children():
            share = getattr(part, "load_signal", None)
            signal *= share() if share is not None else 1.0
        return signal


class Block(GPTLayer):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        block_number: counted from 1; weights are drawn by it.
        attention: makes the attention; called with normalised hidden states ``[batch, sequence, hidden]`` and
            positions, int64 ``[sequence]`` or ``[batch, sequence]``.
        mlp: makes the feed-forward part, which returns hidden states, or these and an auxiliary loss, fp32 ``[1]``.
    """

    is_block: ClassVar[bool] = True

    def __init__(
        self, config: GPTConfig, block_number: int, attention: MakePart | None = None, mlp: MakePart | None = None
    ) -> None:
        super().__init__()
        generator = generator_for("layer", config.seed, block_number)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = (attention or CausalSelfAttention)(config, generator)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = (mlp or FeedForward)(config, generator)

    @property
    def compiled_parts(self) -> tuple[str, ...]:
        """The whole block, unless sizes depend on its data: each would be compiled for itself."""
        return () if any(isinstance(part, CountsPerBatch) for part in self.modules()) else ("",)

    def transform(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply this layer to hidden states; return them and its auxiliary loss, None if it has none.

        Args:
            hidden: ``[batch, sequence, hidden]``, tokens in the order of their positions.
            positions: int64 ``[sequence]`` or ``[batch, sequence]``.
        """
        return self.feed_forward(self.attend(hidden, positions))

    def attend(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add attention to hidden states; see :meth:`transform`."""
        changed: torch.Tensor = hidden + self.attention(self.attention_norm(hidden), positions)
        return changed

    def feed_forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add the feed-forward part to hidden states; see :meth:`transform`."""
        change = self.mlp(self.mlp_norm(hidden))
        change, auxiliary = change if isinstance(change, tuple) else (change, None)
        return hidden + change, auxiliary

    def forward(self, activations: Activations) -> Activations:
        stream = Stream.unpack(activations)
        positions = stream.positions
        if positions is None:
            positions = torch.arange(stream.hidden.shape[1], device=stream.hidden.device)
        hidden, auxiliary = self.transform(stream.hidden, positions)
        if auxiliary is not None and stream.auxiliary is not None:
            auxiliary = stream.auxiliary + auxiliary
        return replace(stream, hidden=hidden, auxiliary=stream.auxiliary if auxiliary is None else auxiliary).pack()


class TokenEmbedding(GPTLayer):
    """Token numbers int64 ``[batch, sequence]`` to ``[batch, sequence, hidden]``, and what travels beside that.

    With :class:`DocumentAttention` in the blocks it takes (token numbers, positions).
    """

    def __init__(self, config: GPTConfig, seed_key: int) -> None:
        super().__init__()
        self.layer_outputs = config.layer_outputs
        self.weight = vocabulary_rows(config, range(config.vocab_size), seed_key)

    def forward(self, tokens: Activations) -> Activations:
        return embed(self.weight, tokens, self.layer_outputs)


class FinalNorm(GPTLayer):
    """The norm before the head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, activations: Activations) -> Activations:
        stream = Stream.unpack(activations)
        return replace(stream, hidden=self.norm(stream.hidden)).pack()


class OutputHead(GPTLayer):
    """``[batch, sequence, hidden]`` to logits ``[batch, sequence, vocabulary]``, and the auxiliary losses if any."""

    def __init__(self, config: GPTConfig, seed_key: int) -> None:
        super().__init__()
        self.weight = vocabulary_rows(config, range(config.vocab_size), seed_key)

    def forward(self, activations: Activations) -> Activations:
        return _logits(self.weight, activations)


def gpt_layers(
    config: GPTConfig, blocks: Sequence[LayerSpec] | None = None, ends: Ends | None = None
) -> list[LayerSpec]:
    """Build the layer list for a ``PipelineModule``: embedding, blocks, final norm, head.

    With ``tied_embedding`` the first and the last entry are one ``TiedLayerSpec`` key, "embedding".

    Args:
        blocks: the layers between embedding and final norm; None: whole plain blocks.
        ends: the layers of the embedding and those of the head; None: one each.
    """
    if blocks is None:
        assert not config.split_blocks, "ds_dynmo.models.half_blocks has their layers"
        blocks = [LayerSpec(Block, config, block_number) for block_number in range(1, config.layers + 1)]
    if ends is not None:
        return [*ends[0], *blocks, LayerSpec(FinalNorm, config), *ends[1]]
    assert not config.num_vocabulary_slices, "ds_dynmo.models.vocabulary_slices has their layers"
    if config.tied_embedding:
        # The head has the forward_fn: checkpoints hold the state of the tied layer that has none.
        embedding = TiedLayerSpec("embedding", TokenEmbedding, config, 0, tied_weight_attr="weight")
        head = TiedLayerSpec("embedding", TokenEmbedding, config, 0, forward_fn=_tied_logits, tied_weight_attr="weight")
    else:
        embedding = LayerSpec(TokenEmbedding, config, 0)
        head = LayerSpec(OutputHead, config, config.layers + 2)
    return [embedding, *blocks, LayerSpec(FinalNorm, config), head]


def language_model_loss(outputs: Activations, labels: Labels) -> torch.Tensor:
    """Compute the loss that is trained: the sum of :func:`language_model_losses`."""
    loss, auxiliary = language_model_losses(outputs, labels)
    return loss if auxiliary is None else loss + auxiliary


def language_model_losses(outputs: Activations, labels: Labels) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the mean cross entropy in nats, in fp32, and what training adds to it, None if that is nothing.

    With a number of tokens the first is the sum over the micro-batch, divided by that number: the mean of these over a
    batch's micro-batches and replicas is the mean over all of its tokens.

    Args:
        outputs: logits ``[batch, sequence, vocabulary]``, or them and the sum of the auxiliary losses, ``[1]``. Early
            exit also passes ``w``, ``[1]``: the total is ``w`` x cross entropy + auxiliary losses, and what is returned
            is (cross entropy, total - cross entropy). Of a vocabulary in slices the cross entropy of each token
            ``[batch, sequence]`` stands in place of logits.
        labels: int64 ``[batch, sequence]``; those of -100 do not count. Or these and a number of tokens, as
            :func:`ds_dynmo.weigh_by_tokens` gives them.
    """
    labels, tokens = (labels, None) if isinstance(labels, torch.Tensor) else labels
    logits, auxiliary, *weight = outputs if isinstance(outputs, tuple) else (outputs, None)
    if logits.dim() == labels.dim():
        counts = labels != NO_LABEL
        loss = torch.where(counts, logits, 0.0).sum() / (counts.sum() if tokens is None else tokens)
    elif tokens is None:
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    else:
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / tokens
    if auxiliary is None:
        return loss, None
    added = auxiliary.squeeze()
    return loss, added - (1 - weight[0].squeeze()) * loss if weight else added


def embed(weight: torch.Tensor, tokens: Activations, layer_outputs: str) -> Activations:
    """Look ``tokens`` up in ``weight``, and pack what layers return: ``layer_outputs``, and positions if any."""
    ids, positions = tokens if isinstance(tokens, tuple) else (tokens, None)
    hidden = F.embedding(ids, weight)
    auxiliary = torch.zeros(1, device=ids.device) if layer_outputs != "hidden" else None
    if layer_outputs == "exits":
        return Stream(hidden, auxiliary, ids, torch.zeros_like(ids)).pack()
    return Stream(hidden, auxiliary, positions=positions).pack()


def _tied_logits(embedding: TokenEmbedding, activations: Activations) -> Activations:
    return _logits(embedding.weight, activations)


def _logits(weight: torch.Tensor, activations: Activations) -> Activations:
    stream = Stream.unpack(activations)
    logits = F.linear(stream.hidden, weight)
    return logits if stream.auxiliary is None else (logits, stream.auxiliary)


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
    linear: nn.Linear = skip_init(nn.Linear, inputs, outputs, bias=False)  # its own initialisation draws globally
    init_normal(linear.weight, std, generator)
    return linear


def init_normal(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Draw ``weight`` from ``generator``: normal, mean 0."""
    nn.init.normal_(weight, std=std, generator=generator)


def vocabulary_rows(config: GPTConfig, rows: range, seed_key: int) -> nn.Parameter:
    """Draw some rows of a matrix of the vocabulary.

    They do not depend on how the matrix is cut: a generator each draws the rows of a block, and of what other slices
    have only the rest of two blocks is drawn.

    Args:
        seed_key: that the matrix is drawn by.
    """
    weight = torch.empty(len(rows), config.hidden_size)
    for start in range(rows.start - rows.start % DRAWN_ROWS, rows.stop, DRAWN_ROWS):
        block = range(start, min(start + DRAWN_ROWS, config.vocab_size))
        drawn = torch.empty(len(block), config.hidden_size)
        key = ("layer", config.seed, seed_key, start) if start else ("layer", config.seed, seed_key)
        init_normal(drawn, INIT_STD, generator_for(*key))
        here = range(max(block.start, rows.start), min(block.stop, rows.stop))
        weight[here.start - rows.start : here.stop - rows.start] = drawn[here.start - start : here.stop - start]
    return nn.Parameter(weight)


def residual_std(config: GPTConfig) -> float:
    """Return the initial standard deviation of what adds to the residual stream: it shrinks with depth (GPT-2)."""
    return INIT_STD / math.sqrt(2 * config.layers)
