"""Tensors that bring no more into a file than their own elements."""

from __future__ import annotations

from typing import Any

import torch


def compact(value: Any) -> Any:
    """``value`` with copies of all tensors in it that are parts of something larger.

    ``torch.save`` writes the whole memory that a tensor lies in: of a weight, or of a view of one, that is the flat
    buffer of a stage. What is one tensor in two places stays one.
    """
    return _compact(value, {})


def _compact(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.untyped_storage().nbytes() > value.nbytes:
            return copies.setdefault(id(value), value.detach().clone())
        return value
    if type(value) in (list, tuple):
        return type(value)(_compact(item, copies) for item in value)
    if type(value) is dict:
        return {key: _compact(item, copies) for key, item in value.items()}
    return value
