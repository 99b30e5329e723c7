"""Changes of tensors that PyTorch does not count, such as those through ``tensor.data``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

_ACCESSES: tuple[Any, ...] = (
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.untyped_storage,
)


class CountHiddenChanges(TorchFunctionMode):
    """Counts each access inside by which a tensor may be changed unseen as a change in place, on this thread.

    What travels while a batch trains is sent again if it was changed in place.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> Any:
        if func in _ACCESSES and not torch.Tensor.is_inference(args[0]):
            increment_version(args[0])
        return func(*args, **(kwargs or {}))
