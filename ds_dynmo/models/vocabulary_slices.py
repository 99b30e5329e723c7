"""Embedding and head of the GPT in slices (``vocabulary_slices``): layers that are no larger than its blocks.

Weights are drawn as those of the whole matrix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.gpt import GPTLayer, vocabulary_rows
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.slice_counts import rows_of_slices
from ds_dynmo.models.stream import Activations, Stream
from ds_dynmo.models.vocabulary import add_embeddings, add_logits, check_tokens, local, token_losses

__all__ = ["EmbeddingSlice", "HeadSlice", "rows_of", "score", "slice_layers"]


class EmbeddingSlice(GPTLayer):
    """Adds the embeddings of the tokens of some rows; tied, :func:`score` computes their logits.

    The first slice takes (token numbers, labels), or (token numbers, positions, labels), int64 ``[batch, sequence]``.

    Args:
        rows: of the whole matrix.
        seed_key: that the whole matrix is drawn by.
        packed: inputs have positions.
    """

    takes_labels: ClassVar[bool] = True

    def __init__(self, config: GPTConfig, rows: range, seed_key: int, *, packed: bool = False) -> None:
        super().__init__()
        self.rows, self.vocabulary, self.packed = rows, config.vocab_size, packed
        self.layer_outputs = config.layer_outputs
        self.weight = vocabulary_rows(config, rows, seed_key)

    @property
    def is_last(self) -> bool:
        """Whether no slice follows."""
        return self.rows.stop == self.vocabulary

    def forward(self, activations: Activations) -> Activations:
        if self.rows.start == 0:
            tokens, labels, *positions = self._inputs(activations)
            auxiliary = torch.zeros(1, device=tokens.device) if self.layer_outputs != "hidden" else None
            hidden = None
        else:
            stream = Stream.unpack(activations)
            assert stream.tokens is not None
            hidden, tokens = stream.hidden, stream.tokens
        row, inside = local(tokens, self.rows)
        hidden = add_embeddings(hidden, F.embedding(row, self.weight), inside)
        if self.rows.start == 0:
            stream = Stream(hidden, auxiliary, tokens, positions=positions[0] if positions else None, labels=labels)
        return replace(stream, hidden=hidden, tokens=None if self.is_last else tokens).pack()

    def _inputs(self, inputs: Activations) -> tuple[torch.Tensor, ...]:
        """Return token numbers, labels, and positions if any."""
        names = ("tokens", "positions", "labels") if self.packed else ("tokens", "labels")
        given = 1 if isinstance(inputs, torch.Tensor) else len(inputs)
        if given != len(names):
            raise ConfigError(
                f"a micro-batch has {given} tensors as its inputs: should be {', '.join(names)}, as the vocabulary is "
                "in slices (vocabulary_slices): call engine.set_batch_fn(ds_dynmo.models.with_labels)"
            )
        tokens, *positions, labels = inputs
        check_tokens(tokens, labels, self.vocabulary)
        return tokens, labels, *positions


class HeadSlice(EmbeddingSlice):
    """Computes the logits of some rows; see :func:`score`."""

    def forward(self, activations: Activations) -> Activations:
        return score(self, activations)


def score(layer: EmbeddingSlice, activations: Activations) -> Activations:
    """Add the logits of a slice's rows to the running numbers of each token.

    The last slice returns the cross entropy of each token, fp32 ``[batch, sequence]``, and the auxiliary losses if any.
    """
    stream = Stream.unpack(activations)
    assert stream.labels is not None
    logits = F.linear(stream.hidden, layer.weight)
    scores = add_logits(stream.scores, logits, stream.labels, layer.rows)
    if not layer.is_last:
        return replace(stream, scores=scores).pack()
    losses = token_losses(scores)
    return losses if stream.auxiliary is None else (losses, stream.auxiliary)


def slice_layers(config: GPTConfig, *, packed: bool) -> tuple[list[LayerSpec], list[LayerSpec]]:
    """List the layers of the embedding and those of the head.

    With ``tied_embedding`` the slices of the same rows are one ``TiedLayerSpec`` key, "embedding 0" and so on.
    """
    front: list[LayerSpec] = []
    back: list[LayerSpec] = []
    for number, rows in enumerate(rows_of_slices(config.vocab_size, config.num_vocabulary_slices)):
        key, tied = f"embedding {number}", {"packed": packed, "tied_weight_attr": "weight"}
        if config.tied_embedding:
            front.append(TiedLayerSpec(key, EmbeddingSlice, config, rows, 0, **tied))
            back.append(TiedLayerSpec(key, EmbeddingSlice, config, rows, 0, forward_fn=score, **tied))
        else:
            front.append(LayerSpec(EmbeddingSlice, config, rows, 0, packed=packed))
            back.append(LayerSpec(HeadSlice, config, rows, config.layers + 2))
        front[-1].rows = back[-1].rows = rows
    return front, back


def rows_of(spec: LayerSpec) -> range | None:
    """Return the rows of the slice that ``spec`` builds; None of any other layer."""
    rows: range | None = getattr(spec, "rows", None)
    return rows
