"""Try once what a device can compute: layers choose their kernels by that, not by a device's name.

Each probe stands beside the kernel that it tries, and keeps its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from deepspeed.accelerator import get_accelerator

__all__ = ["can_compute"]

_NO_ANSWER = (MemoryError, OSError, torch.OutOfMemoryError)  # of the machine at this moment, not of its kernels


def can_compute(attempt: Callable[[], object]) -> bool:
    """Return whether ``attempt`` succeeds: it computes something small on a device, forward or backward.

    It runs in a thread of its own, where no mode of the caller's holds: no autocast, and no hook that counts the
    tensors saved for the backward pass, as activation checkpointing has them.

    Raises:
        OSError, MemoryError, torch.OutOfMemoryError: the machine has no room, which says nothing about its kernels.
    """
    accelerator = get_accelerator()
    device = accelerator.current_device()

    def attempted() -> None:
        accelerator.set_device(device)  # which each thread has one of
        attempt()

    with ThreadPoolExecutor(1, "ds_dynmo probe") as thread:
        try:
            thread.submit(attempted).result()
        except _NO_ANSWER:
            raise
        except Exception:  # of torch, of its compiler or of a kernel's library: there is no common class
            return False
    return True
