"""Bytes that a rank's tensors take, and those that its layers hold; every function runs on a rank."""

from __future__ import annotations

import gc
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ds_dynmo.engine.measure import layer_sizes
from ds_dynmo.plan import HeldBytes

BESIDE = 16 << 10  # bytes beside layers: headers, and other messages between ranks


class TensorBytes(TorchDispatchMode):
    """Records the most bytes that all tensors on this process's device hold at once, whoever holds them.

    Attributes:
        began: bytes of all tensors at the start.
        in_step: whether the optimizer's step runs: what it allocates for a moment is not predicted, and does not count.
    """

    in_step = False

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        gc.collect()
        for value in gc.get_objects():
            if isinstance(value, torch.Tensor):
                self._add(value)
        self.began = self.peak = self._held()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, torch.Tensor):
                self._add(value)
        if not self.in_step:
            self.peak = max(self.peak, self._held())
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided and tensor.device.type == get_accelerator().device_name():
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _held(self) -> int:
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        return sum(size for _, size in self._storages.values())


def held_now(engine: Any) -> tuple[tuple[HeldBytes, ...], tuple[int, ...]]:
    """Return per layer what it holds between two batches, and its bytes in training."""
    return layer_sizes.held_from(
        engine.stage.comm.max_over_world(layer_sizes.held_table(engine.stage.layers, engine.stage.state))
    )
