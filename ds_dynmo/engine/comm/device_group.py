"""Process groups of all ranks for tensors on the ranks' devices."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.engine.comm.bounded import call_within_seconds


def device_group(device: torch.device, timeout: timedelta, store_seconds: float) -> Any:
    """Make a group of all ranks on the default backend, and connect it. Collective.

    NCCL connects a group in its first operation, in which all ranks have to take part. So the first operation must not
    be a message between two ranks.

    Args:
        device: the engine's device.
        timeout: that operations on the group, and its creation, wait for the other ranks.
        store_seconds: that its creation waits longer, for a store that may be out of reach.
    """

    def make() -> Any:
        group = dist.new_group(timeout=timeout)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group

    return call_within_seconds(timeout.total_seconds() + store_seconds, make)
