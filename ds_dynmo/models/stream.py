"""Tensors passed between layers, and so between stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

__all__ = ["Activations", "Stream"]

Activations = torch.Tensor | tuple[torch.Tensor, ...]  # hidden states alone, or with other tensors


@dataclass(frozen=True)
class Stream:
    """The residual stream with what travels beside it.

    DeepSpeed sends one tensor or a tuple of them. Floating ones take a gradient each, integer ones none.

    Attributes:
        hidden: ``[batch, sequence, hidden]``.
        auxiliary: the sum of the auxiliary losses of the layers so far, fp32 ``[1]``; the loss function adds it.
        tokens: the input tokens, int64 ``[batch, sequence]``, where layers have losses of their own.
        exited: int64 ``[batch, sequence]``: after how many blocks a token left the model, 0 while it is still in it.
        positions: int64 ``[batch, sequence]``, in each document of a sequence from 0 on; None: 0, 1, ...
    """

    hidden: torch.Tensor
    auxiliary: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    exited: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    @classmethod
    def unpack(cls, activations: Activations) -> Stream:
        """Read the tensors that :meth:`pack` returned."""
        hidden, *others = (activations,) if isinstance(activations, torch.Tensor) else activations
        positions = others.pop(0) if others and not others[0].is_floating_point() else None
        return replace(cls(hidden, *others), positions=positions)

    def pack(self) -> Activations:
        """Return the tensors to send: hidden states, (hidden, auxiliary), or (hidden, auxiliary, tokens, exited).

        Positions follow hidden states directly: they are integers, and auxiliary losses are not.
        """
        if self.positions is not None:
            packed = replace(self, positions=None).pack()
            hidden, *others = (packed,) if isinstance(packed, torch.Tensor) else packed
            return hidden, self.positions, *others
        if self.auxiliary is None:
            return self.hidden
        auxiliary = self.auxiliary
        if self.hidden.requires_grad and not auxiliary.requires_grad:
            auxiliary = auxiliary.detach().requires_grad_()  # DeepSpeed asks all floating outputs for a gradient
        if self.tokens is None or self.exited is None:
            return self.hidden, auxiliary
        return self.hidden, auxiliary, self.tokens, self.exited
