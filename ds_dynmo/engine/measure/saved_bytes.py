"""The bytes that layers and the loss save for their backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_dynmo.torch_private import saved_tensors_hooks
from ds_dynmo.unmarked import unmarked


class SavedBytes:
    """The saved storages, kept alive so that their addresses are not reused."""

    def __init__(self, left_out: Sequence[torch.Tensor]) -> None:
        self._left_out = {unmarked(tensor).untyped_storage().data_ptr() for tensor in left_out}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor``, once."""
        if tensor.layout == torch.strided:
            storage = unmarked(tensor).untyped_storage()
            if storage.data_ptr() not in self._left_out:
                self._storages[storage.data_ptr()] = storage

    def take(self) -> int:
        """Return the bytes of the collected tensors, and drop these."""
        total = sum(storage.nbytes() for storage in self._storages.values())
        self._storages = {}
        return total


@contextmanager
def saved_for_backward(left_out: Sequence[torch.Tensor]) -> Iterator[SavedBytes]:
    """Count the bytes saved for backward inside, except those of ``left_out``."""
    saved = SavedBytes(left_out)
    with _saved_tensors(saved.add):
        yield saved


def state_of(layer: Any) -> list[torch.Tensor]:
    """Return the parameters and buffers of a layer; a function has none."""
    module = layer.args[0] if isinstance(layer, partial) and layer.args else layer
    if not isinstance(module, nn.Module):
        return []
    return [t for t in [*module.parameters(), *module.buffers()] if t.layout == torch.strided]


@contextmanager
def loss_through(module: Any, around: Callable[..., Any]) -> Iterator[None]:
    """Let a PipelineModule with a loss compute it by ``around(loss_fn, outputs, labels)``."""
    loss_fn, attributes = getattr(module, "loss_fn", None), vars(module)
    if loss_fn is None:
        yield
        return
    before = {"loss_fn": attributes["loss_fn"]} if "loss_fn" in attributes else {}  # absent if it is an nn.Module
    attributes["loss_fn"] = partial(around, loss_fn)
    try:
        yield
    finally:
        del attributes["loss_fn"]
        attributes.update(before)


@contextmanager
def _saved_tensors(count: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``count`` with every tensor saved for backward, and keep other hooks (of checkpointing)."""
    outer = saved_tensors_hooks(ignore_disabled=False)

    def pack(tensor: torch.Tensor) -> Any:
        count(tensor)
        return outer[0](tensor) if outer else tensor

    def unpack(packed: Any) -> Any:
        return outer[1](packed) if outer else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
