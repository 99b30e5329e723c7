"""Process groups of all ranks for tensors on the ranks' accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.engine.comm.bounded import call_within_seconds
from ds_dynmo.engine.comm.host_links import PeerTensor


def device_group(device: torch.device, timeout: timedelta, store_seconds: float) -> Any:
    """Make a group of all ranks on the default backend, and connect it. Collective.

    Some backends, such as NCCL, connect a group in its first operation, in which all ranks have to take part. So the
    first operation must not be a message between two ranks.

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


class DeviceLinks:
    """Messages between the ranks of a process group, as :class:`HostLinks` has them on the CPU."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def post(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]) -> list[Any]:
        """Begin several operations together."""
        operations = [dist.P2POp(dist.irecv, tensor, rank, group=self._group) for rank, tensor in receives]
        operations += [dist.P2POp(dist.isend, tensor, rank, group=self._group) for rank, tensor in sends]
        return dist.batch_isend_irecv(operations) if operations else []
