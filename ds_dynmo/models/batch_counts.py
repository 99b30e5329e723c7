"""Count something over the micro-batches of a training batch: when a batch begins, and which passes count."""

from __future__ import annotations

from typing import Self

from torch import nn

from ds_dynmo.torch_private import backward_pass_number

__all__ = ["CountsPerBatch", "is_recomputing"]


class CountsPerBatch(nn.Module):
    """A module that counts something over the micro-batches of the last training batch.

    DeepSpeed calls ``module.train()`` when a training batch begins, and ``eval()`` before it evaluates.
    """

    _begins = True

    def train(self, mode: bool = True) -> Self:
        """Set the mode as ``nn.Module`` does. Training mode begins a batch."""
        if mode:
            self._begins = True
        return super().train(mode)

    def begins_batch(self) -> bool:
        """Return True once in each training batch, at the first call: what is counted then begins at zero."""
        begins, self._begins = self._begins, False
        return begins


def is_recomputing() -> bool:
    """Return whether a backward pass runs this code, as activation checkpointing does: its calls are not counted.

    Private in torch; it is what ``torch.utils.checkpoint`` itself asks (read in 2.13.0).
    """
    return backward_pass_number() != -1
