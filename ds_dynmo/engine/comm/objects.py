"""Pickling of objects for other ranks, with every tensor on the CPU.

A tensor is unpickled on the device on which it was pickled, which opens a context on the sender's device. So tensors
are copied to the CPU first, and to the reader's device afterwards: the optimizer's count of steps (on the accelerator
with ``fused`` or ``capturable``), a learning rate that is a tensor, or other state of a user.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.move.pickling import dump, load
from ds_dynmo.unmarked import unmarked


def to_bytes(value: Any) -> bytes:
    """Pickle ``value``, its tensors on the CPU.

    Raises:
        TypeError: a tensor has no data ("meta"). Other errors are those of ``pickle``.
    """
    dumped = dump(value)
    on_cpu = [_is_on_cpu(tensor) for tensor in dumped.tensors]
    return pickle.dumps((dumped.data, [_to_cpu(tensor) for tensor in dumped.tensors], on_cpu), pickle.HIGHEST_PROTOCOL)


def from_bytes(data: bytes, device: torch.device) -> Any:
    """Load what :func:`to_bytes` returned on another rank. Tensors that were not on the CPU there go to ``device``."""
    shell, tensors, on_cpu = pickle.loads(data)
    return load(shell, [tensor if stays else _moved(tensor, device) for tensor, stays in zip(tensors, on_cpu)])


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise TypeError(f"a tensor of shape {list(tensor.shape)} is on the device meta: it has no data to be sent")
    return tensor if _is_on_cpu(tensor) else _moved(tensor, torch.device("cpu"))


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    data = unmarked(tensor).to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)
