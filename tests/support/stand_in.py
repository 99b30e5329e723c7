"""A tensor that claims to be on an accelerator, for machines without one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


class Accelerated(torch.Tensor):
    """Computes on the CPU, and must not be pickled."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Accelerated:
        made: Accelerated = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device="cuda:0")
        made.held = held
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("it would be unpickled on the sender's device, in a context that the reader opens there")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Accelerated({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = "device" in kwargs and torch.device(kwargs["device"]).type != "cuda"
        inner = tree_map(lambda value: value.held if isinstance(value, cls) else value, (args, kwargs))
        result = function(*inner[0], **inner[1])
        if function._schema.is_mutable:
            return args[0]
        return result if leaves else tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)
