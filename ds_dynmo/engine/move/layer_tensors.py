"""The tensors of layers: by name, and by the memory in which they lie."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import nn

from ds_dynmo.torch_private import buffers_of, parameters_of
from ds_dynmo.unmarked import unmarked


def registered(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters and buffers by name."""
    held = {**parameters_of(module), **buffers_of(module)}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def named_tensors(path: str, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List the own parameters and buffers of the module at ``path``, with their paths."""
    return [(f"{path}.{name}" if path else name, tensor) for name, tensor in registered(module).items()]


class TensorsByMemory:
    """Finds which of some tensors another one lies in.

    Args:
        tensors: of which those without memory are never found.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        held = sorted(filter(has_memory, tensors), key=torch.Tensor.data_ptr)
        self._begins = [*map(torch.Tensor.data_ptr, held)]
        self._longest = list(accumulate(held, _ends_last))  # of those that begin so far

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor in whose memory ``tensor`` begins; None: there is none."""
        whole = self.find_address(unmarked(tensor).data_ptr()) if has_memory(tensor) else None
        return whole if whole is not None and tensor.device == whole.device else None

    def find_address(self, address: int) -> torch.Tensor | None:
        """Return a tensor in whose memory ``address`` is; None: there is none."""
        place = bisect_right(self._begins, address) - 1
        whole = self._longest[place] if place >= 0 else None
        return whole if whole is not None and address < _end(whole) else None


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a part of one block of memory."""
    data = unmarked(tensor)
    return bool(data.layout == torch.strided and data.numel() and data.data_ptr())


def _ends_last(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return max(one, other, key=_end)


def _end(tensor: torch.Tensor) -> int:
    return unmarked(tensor).data_ptr() + tensor.nbytes
