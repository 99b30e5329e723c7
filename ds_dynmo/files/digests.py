"""Hash values to compare them with what a checkpoint says of them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ds_dynmo.unmarked import unmarked

__all__ = ["digest"]


def digest(value: Any) -> str:
    """Hash a plain value to 16 hexadecimal digits."""
    whole = hashlib.sha256()
    _feed(whole, value)
    return whole.hexdigest()[:16]


def _feed(whole: Any, value: Any) -> None:
    whole.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        tensor = unmarked(value)
        parts = [tensor]
        if tensor.layout == torch.sparse_csr:
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        for part in parts:
            data = part.cpu().contiguous()
            whole.update(repr((tuple(tensor.shape), data.dtype)).encode())
            whole.update(data.reshape(-1).view(torch.uint8).numpy() if data.numel() else b"")
    elif isinstance(value, (set, frozenset)):
        whole.update(repr(sorted(map(digest, value))).encode())
    elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        whole.update(repr([digest(item) for item in value]).encode())
    elif isinstance(value, dict):
        whole.update(repr([(digest(key), digest(item)) for key, item in value.items()]).encode())
    else:
        whole.update(repr(value).encode())
