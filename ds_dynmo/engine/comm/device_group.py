"""Process groups of all ranks for tensors on the ranks' devices."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.engine.comm.bounded import call_within_seconds


def device_group(device: torch.device, timeout: timedelta, timeout_seconds: float) -> Any:
    """Make a group of all ranks on the default backend, and connect it. Collective.

    Some backends, such as NCCL, connect a group in its first operation, in which all ranks have to take part. So the
    first operation must not be a message between two ranks. gloo groups are connected already.

    Args:
        device: the engine's device.
        timeout: of operations on the group.
        timeout_seconds: that creating the group waits for the other ranks.
    """

    def make() -> Any:
        group = dist.new_group(timeout=timeout)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group

    return call_within_seconds(2 * timeout_seconds, make)
