"""Embedding and head of a Hugging Face model in slices of the vocabulary (:mod:`ds_dynmo.models.vocabulary`).

Transformers' own modules compute, with some rows of their weights. What its model computes around its head is computed
around each slice of it: scales and caps of logits, which treat each word alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.config.explain import show
from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.modules import RouterLoss, check_inputs, pack, unpack, with_router_loss
from ds_dynmo.models.huggingface.shares import Rows
from ds_dynmo.models.huggingface.source import Source
from ds_dynmo.models.slice_counts import Slices, num_slices, rows_of_slices
from ds_dynmo.models.stream import Activations, Stream
from ds_dynmo.models.vocabulary import add_embeddings, add_logits, check_tokens, local, token_losses

__all__ = ["InputEmbeddingSlice", "LMHeadSlice", "score", "slice_layers", "slices_of"]


class InputEmbeddingSlice(nn.Module):
    """Adds the embeddings of the tokens of some rows; tied, :func:`score` computes their logits.

    The first slice takes token numbers, the model's other inputs and labels, int64 ``[batch, sequence]`` each.

    Args:
        layer: number of the whole embedding among the layers of ``source``.
        rows: of the whole matrix.
    """

    takes_labels: ClassVar[bool] = True

    def __init__(self, source: Source, layer: int, rows: range, router_loss: RouterLoss | None) -> None:
        super().__init__()
        self.rows, self.vocabulary = rows, int(source.config.vocab_size)
        self.router_loss = router_loss
        self.inputs = source.inputs
        self.positions = source.positions
        self.part = source.build(layer, Rows(rows))
        self.stubbed = source.stubbed
        self.has_input_transform = source.has_input_transform
        self.has_output_transform = source.has_output_transform

    @property
    def is_last(self) -> bool:
        """Whether no slice follows."""
        return self.rows.stop == self.vocabulary

    def forward(self, activations: Activations) -> Activations:
        stream, inputs = self._begin(activations) if self.rows.start == 0 else unpack(activations, self.inputs)
        tokens = stream.tokens
        assert tokens is not None
        row, inside = local(tokens, self.rows)
        hidden = add_embeddings(None if self.rows.start == 0 else stream.hidden, self.part(row), inside)
        if self.is_last and self.has_input_transform:
            hidden = self.stubbed.enter(hidden, inputs, training=self.training)
        return pack(replace(stream, hidden=hidden, tokens=None if self.is_last else tokens), inputs)

    def _begin(self, given: Activations) -> tuple[Stream, dict[str, torch.Tensor]]:
        """Return the stream before there are hidden states, and the model's inputs beside the tokens."""
        names = ("tokens", *self.inputs, "labels")
        check_inputs(given, names, self.positions, "call engine.set_batch_fn(ds_dynmo.models.with_labels)")
        tokens, *beside, labels = given
        check_tokens(tokens, labels, self.vocabulary)
        auxiliary = None if self.router_loss is None else self.router_loss.start(tokens.device)
        nothing = torch.empty(0, device=tokens.device)
        return Stream(nothing, auxiliary, tokens, labels=labels), dict(zip(self.inputs, beside, strict=True))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of this slice's rows, as transformers' output embedding does."""
        if isinstance(self.part, nn.Embedding):
            return F.linear(hidden, self.part.weight)
        made: torch.Tensor = self.part(hidden)
        return made


class LMHeadSlice(InputEmbeddingSlice):
    """Computes the logits of some rows; see :func:`score`."""

    def forward(self, activations: Activations) -> Activations:
        return score(self, activations)


def score(layer: InputEmbeddingSlice, activations: Activations) -> Activations:
    """Add the logits of a slice's rows to the running numbers of each token.

    The last slice returns the cross entropy of each token, fp32 ``[batch, sequence]``, and the router loss if any.
    """
    stream, inputs = unpack(activations, layer.inputs)
    assert stream.labels is not None
    hidden = stream.hidden
    logits = layer.stubbed.logits(hidden, layer.logits) if layer.has_output_transform else layer.logits(hidden)
    scores = add_logits(stream.scores, logits, stream.labels, layer.rows)
    if not layer.is_last:
        return pack(replace(stream, scores=scores), inputs)
    return with_router_loss(token_losses(scores), layer.router_loss, stream, inputs)


def slice_layers(source: Source, router_loss: RouterLoss | None) -> tuple[list[LayerSpec], list[LayerSpec]]:
    """List the layers of the embedding and those of the head.

    If they are one weight, the slices of the same rows are one ``TiedLayerSpec`` key, "embedding 0" and so on.
    """
    every, first = rows_of_slices(source.config.vocab_size, source.slices), source.of(0)
    if not source.tied:
        last = len(source.outline.paths) - 1
        final = source.of(last)
        front = [LayerSpec(InputEmbeddingSlice, first, 0, rows, router_loss) for rows in every]
        return front, [LayerSpec(LMHeadSlice, final, last, rows, router_loss) for rows in every]
    tied = [
        partial(TiedLayerSpec, f"embedding {number}", InputEmbeddingSlice, first, 0, rows, router_loss)
        for number, rows in enumerate(every)
    ]
    weight = {"tied_weight_attr": "part.weight"}
    return [use(**weight) for use in tied], [use(forward_fn=score, **weight) for use in tied]


def slices_of(source: Source, slices: Slices, label: str) -> int:
    """Return how many slices ``vocabulary_slices`` asks for; 0: the vocabulary is whole.

    Args:
        source: as :func:`~ds_dynmo.models.huggingface.verification.find_transforms` returns it.

    Raises:
        ConfigError: it is no such number, or the model's embedding or head cannot be in slices.
    """
    vocabulary = source.config.vocab_size
    if slices is None:
        return 0
    if slices != "auto" and not (type(slices) is int and 1 <= slices <= vocabulary):
        raise ConfigError(
            f'vocabulary_slices {show(slices)}: should be from 1 to {vocabulary}, the vocabulary of {label}, or "auto"'
        )
    count = num_slices(slices, vocabulary, head=_weights_of_head(source), block=_weights_of_block(source))
    if count and (why := _why_whole(source, rows_of_slices(vocabulary, count))):
        raise ConfigError(
            f"{label}: model_type {source.config.model_type}: vocabulary_slices {show(slices)}: {why}: should be null"
        )
    return count


def _weights_of_head(source: Source) -> int:
    weight = source.skeleton.get_output_embeddings().weight
    return int(weight.numel())


def _weights_of_block(source: Source) -> float:
    """Return how many weights a token is multiplied by in a decoder layer, in the mean of all."""
    total = 0.0
    for block, experts in zip(source.blocks, source.experts):
        for name, weight in block.named_parameters():
            chosen = experts is not None and name.startswith(f"{experts.path}.")
            share = experts.top_k / experts.count if experts is not None and chosen else 1.0
            total += share * weight.numel() if weight.dim() > 1 else 0.0
    return total / len(source.experts)


def _why_whole(source: Source, rows: Sequence[range]) -> str:
    """Say why embedding and head cannot be in slices; empty: they can."""
    skeleton, paths = source.skeleton, source.outline.paths
    embedding, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head, {paths[-1]}, is no product with a matrix but a {type(head).__name__}"
    if not isinstance(embedding, nn.Embedding) or {*embedding.state_dict()} != {"weight"}:
        return f"its embedding, {paths[0]}, is no matrix of words alone but a {type(embedding).__name__}"
    shapes = {len(embedding.weight), len(head.weight), source.config.vocab_size}
    if len(shapes) > 1:
        return f"{paths[0]} has {len(embedding.weight)} rows, {paths[-1]} {len(head.weight)}, vocab_size is not both"
    if source.has_output_transform and not _treats_words_alone(source, rows):
        return f"what the model computes of the logits of {paths[-1]} is not of each word alone"
    for path in (paths[0], paths[-1]):
        beside = [] if source.adapters is None else source.adapters.part(path).state_dict()
        if lora := [name for name in beside if "lora_" in name]:
            return f"peft: {path} is a target, and {lora[0]} belongs to all of its rows; leave it out, or it"
    return ""


@torch.no_grad()
def _treats_words_alone(source: Source, rows: Sequence[range]) -> bool:
    """Return whether transformers' model makes the same of some words' logits as of these among all."""
    width = source.skeleton.get_input_embeddings().weight.shape[1]
    hidden, every = torch.ones(1, 2, width), torch.linspace(-3, 3, 2 * rows[-1].stop).view(1, 2, -1)
    try:
        whole = source.stubbed.logits(hidden, lambda _: every)
        parts = [source.stubbed.logits(hidden, lambda _, r=r: every[..., r.start : r.stop]) for r in rows]  # type: ignore[misc]
    except Exception:  # what transformers' models raise is not known
        return False
    return whole.shape == every.shape and torch.allclose(whole, torch.cat(parts, dim=-1))
