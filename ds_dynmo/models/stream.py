"""Tensors passed between layers, and so between stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Activations", "Labels", "Stream"]

Activations = torch.Tensor | tuple[torch.Tensor, ...]  # hidden states alone, or with other tensors
Labels = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # alone, or with the tokens that their losses are divided by


@dataclass(frozen=True)
class Stream:
    """The residual stream with what travels beside it.

    DeepSpeed sends one tensor or a tuple of them. Floating ones take a gradient each, integer ones none.

    Attributes:
        hidden: ``[batch, sequence, hidden]``.
        auxiliary: the sum of the auxiliary losses of the layers so far, fp32 ``[1]``; the loss function adds it.
        tokens: the input tokens, int64 ``[batch, sequence]``, where layers have losses of their own, and before the
            last slice of an embedding.
        exited: int64 ``[batch, sequence]``: after how many blocks a token left the model, 0 while it is still in it.
        positions: int64 ``[batch, sequence]``, in each document of a sequence from 0 on; None: 0, 1, ...
        labels: int64 ``[batch, sequence]``, where the vocabulary is in slices.
        scores: fp32 ``[2, batch, sequence]``, between slices of the head (:mod:`ds_dynmo.models.vocabulary`).
    """

    hidden: torch.Tensor
    auxiliary: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    exited: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    scores: torch.Tensor | None = None

    @classmethod
    def unpack(cls, activations: Activations) -> Stream:
        """Read the tensors that :meth:`pack` returned."""
        if isinstance(activations, torch.Tensor):
            return cls(activations)
        hidden, *floats = (tensor for tensor in activations if tensor.is_floating_point())
        integers = [tensor for tensor in activations if not tensor.is_floating_point()]
        scores = floats.pop() if floats and floats[-1].dim() == 3 else None
        labels, *given = integers.pop().unbind() if integers and integers[-1].dim() == 3 else (None,)
        positions = integers.pop(0) if len(integers) % 2 else None
        tokens, exited = integers or (*given, None, None)[:2]
        return cls(hidden, floats[0] if floats else None, tokens, exited, positions, labels, scores)

    def pack(self) -> Activations:
        """Return the tensors to send, integers last: where others follow one, DeepSpeed's own engine hangs.

        That is hidden states, auxiliary losses, and scores; then positions, or tokens and exited; then
        ``[1 or 2, batch, sequence]``: labels, and tokens before the last slice of an embedding. What is None is left
        out: hidden states alone are no tuple.
        """
        auxiliary, packed = self.auxiliary, [self.hidden]
        if auxiliary is not None:
            if self.hidden.requires_grad and not auxiliary.requires_grad:
                auxiliary = auxiliary.detach().requires_grad_()  # DeepSpeed asks all floating outputs for a gradient
            packed.append(auxiliary)
        packed += [one for one in (self.scores, self.positions) if one is not None]
        if self.exited is not None and self.tokens is not None:
            packed += [self.tokens, self.exited]
        if self.labels is not None:
            packed.append(torch.stack([one for one in (self.labels, self.tokens) if one is not None]))
        return tuple(packed) if len(packed) > 1 else self.hidden
