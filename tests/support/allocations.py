"""Bytes of tensors that operations make."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Records the bytes of the tensors that operations made in the body.

    Attributes:
        largest: of one tensor.
        total: of all.
    """

    largest, total = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and not result.is_meta:
            storage = result.untyped_storage()
            if storage.data_ptr() not in given:
                self.largest = max(self.largest, storage.nbytes())
                self.total += storage.nbytes()
        return result
