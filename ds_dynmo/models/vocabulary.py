"""The vocabulary in slices: a few rows of the embedding's and the head's matrix are a layer of their own.

A slice at the front adds the embeddings of the tokens that it has. A slice at the end computes the logits of its rows,
and from them two running numbers of each token: the logarithm of the sum of exponentials, and the logit of the label
if the slice has it (0.0 before). Their difference after the last slice is the cross entropy, and autograd through the
running numbers gives its gradient. So no layer holds all logits, and labels travel with the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec

__all__ = [
    "NO_LABEL",
    "add_embeddings",
    "add_logits",
    "check_tokens",
    "local",
    "takes_labels",
    "token_losses",
    "with_labels",
]

NO_LABEL = -100


def with_labels(batch: tuple[Any, Any]) -> tuple[tuple[Any, ...], Any]:
    """Put the labels of a batch behind its inputs too, for a model whose vocabulary is in slices.

    ``engine.set_batch_fn(with_labels)`` does it for every batch. A number of tokens beside the labels stays there.
    """
    inputs, labels = batch
    alone = labels[0] if isinstance(labels, Sequence) else labels
    return (*(inputs if isinstance(inputs, Sequence) else (inputs,)), alone), labels


def takes_labels(layers: Sequence[LayerSpec]) -> bool:
    """Return whether the first of a model's ``layers`` takes labels behind its other inputs."""
    return getattr(layers[0].typename, "takes_labels", False)


def check_tokens(tokens: torch.Tensor, labels: torch.Tensor, vocabulary: int) -> None:
    """Look the tokens of a micro-batch up: torch fails where there is no such token, as with a whole matrix.

    A slice cannot tell the tokens of other slices from tokens of none.
    """
    known = torch.zeros((), device=tokens.device).expand(vocabulary)
    for numbers in (tokens, labels.masked_fill(labels == NO_LABEL, 0)):
        known.index_select(0, numbers.flatten())


def add_embeddings(hidden: torch.Tensor | None, found: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Take the embeddings ``found`` for the tokens ``inside`` a slice, and keep the others.

    Args:
        hidden: of the slices before, ``[batch, sequence, hidden]``; None: there are none.
    """
    return torch.where(inside.unsqueeze(-1), found, torch.zeros_like(found) if hidden is None else hidden)


def local(numbers: torch.Tensor, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of tokens in a slice, and which tokens it has; others get any row.

    These are spread over all rows: an accelerator adds up their gradients, zeros, row by row.
    """
    offset = numbers - rows.start
    return offset.remainder(len(rows)), (offset >= 0) & (offset < len(rows))


def add_logits(scores: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, rows: range) -> torch.Tensor:
    """Add a slice's logits to the running numbers of each token, fp32 ``[2, batch, sequence]``.

    Args:
        scores: of the slices before; None: there are none.
        logits: ``[batch, sequence, rows]``, of any dtype.
        labels: int64 ``[batch, sequence]``.
    """
    exact = logits.float()
    row, inside = local(labels, rows)
    total = exact.logsumexp(dim=-1)
    of_label = torch.where(inside, exact.gather(-1, row.unsqueeze(-1)).squeeze(-1), 0.0)
    if scores is not None:
        total, of_label = torch.logaddexp(scores[0], total), scores[1] + of_label
    return torch.stack((total, of_label))


def token_losses(scores: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each token after the last slice, fp32 ``[batch, sequence]``."""
    return scores[0] - scores[1]
