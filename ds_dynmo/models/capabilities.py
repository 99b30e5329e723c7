"""Ask a device what it can compute by trying it once: layers choose their kernels by that, by no device's name.

Each probe stands beside the kernel that it tries, and keeps its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

__all__ = ["can_compute", "refusing_host_waits"]

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


@contextmanager
def refusing_host_waits(device: torch.device) -> Iterator[None]:
    """Inside, let a wait of the host for ``device`` fail, where torch can do that (``torch.cuda`` alone, in 2.13.0).

    It tells a kernel from a loop over what the host has to read first.
    """
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "set_sync_debug_mode"):
        yield
        return
    before = module.get_sync_debug_mode()
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode(before)
