"""Tensors without what users have set on them: an attribute may hide a method, as ``bias.stride = 1`` does.

Megatron and GPT-NeoX mark their parameters so. Properties of torch (``shape``, ``ndim``, ``nbytes``) cannot be hidden.
Methods of a user's tensor are called on :func:`unmarked`, or by the class, but for those that DeepSpeed itself calls on
every parameter, such as ``numel``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["register_hook", "unmarked"]


def unmarked(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached alias of a tensor, without the attributes that were set on it."""
    return torch.Tensor.detach(tensor)


def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
    """Register a hook on the gradient of a tensor, as its method does."""
    handle: RemovableHandle = torch.Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]
    return handle
