"""Copy numbers to a device, and count there, without the host waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["counts_of", "integers"]


def integers(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Make a tensor of numbers that the host has."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type not in ("cpu", "meta"))
    return pinned.to(device, non_blocking=True)


def counts_of(values: torch.Tensor, size: int) -> torch.Tensor:
    """Count how often each of ``range(size)`` is in ``values``, int64 of any shape. Accelerators wait in ``bincount``.

    Returns:
        int64 ``[size]``.
    """
    flat = values.flatten()
    return flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat))
