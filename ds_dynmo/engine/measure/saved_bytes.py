"""Count what layers, and the loss, save for their backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_dynmo.torch_private import saved_tensors_hooks


class SavedBytes:
    """The storages that were saved. They live until then, or another one might come to have the address of one."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Count what holds the content of ``tensor``, once."""
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._storages[storage.data_ptr()] = storage

    def take(self) -> int:
        """Return the bytes of the collected tensors, and drop these."""
        total = sum(storage.nbytes() for storage in self._storages.values())
        self._storages = {}
        return total


@contextmanager
def saved_for_backward(own: Sequence[torch.Tensor]) -> Iterator[SavedBytes]:
    """Count what is saved for backward inside, beside ``own``."""
    saved = SavedBytes(own)
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
    loss_fn, own = getattr(module, "loss_fn", None), vars(module)
    if loss_fn is None:
        yield
        return
    before = {"loss_fn": own["loss_fn"]} if "loss_fn" in own else {}  # not there if it is an nn.Module
    own["loss_fn"] = partial(around, loss_fn)
    try:
        yield
    finally:
        del own["loss_fn"]
        own.update(before)


@contextmanager
def _saved_tensors(count: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``count`` with every tensor saved for backward, and keep the hooks that are set (checkpointing's)."""
    outer = saved_tensors_hooks(ignore_disabled=False)

    def pack(tensor: torch.Tensor) -> Any:
        count(tensor)
        return outer[0](tensor) if outer else tensor

    def unpack(packed: Any) -> Any:
        return outer[1](packed) if outer else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
