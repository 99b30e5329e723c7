"""How a layer learns that a training batch begins."""

from __future__ import annotations

from torch import nn
from typing_extensions import Self

__all__ = ["CountsPerBatch"]


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
