"""Process groups for messages between neighbouring stages, for backends that run operations in the order of posting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.engine.comm.bounded import default_timeout
from ds_dynmo.engine.comm.device_group import device_group


class NeighbourLinks:
    """Operations with the neighbouring stages, in the order of posting. Construction is collective.

    NCCL runs all operations that a rank posts on a process group on one stream, in order, whatever their peer: batches
    always, and single operations if the default group is bound to a device, as DeepSpeed binds it. But messages with
    one neighbour must not wait for those with the other. So there are two groups, for alternate boundaries of the
    pipeline: in each of them a rank has one neighbour. All replicas and slices share them.

    Args:
        stage: of this rank.
        rank_of: returns the rank that holds a stage.
        device: the engine's device.
        store_seconds: as for :func:`device_group`.
    """

    def __init__(self, stage: int, rank_of: Callable[[int], int], device: torch.device, store_seconds: float) -> None:
        self._stage, self._rank_of = stage, rank_of
        timeout = default_timeout()  # as for DeepSpeed's messages: a receive may wait for a whole pass
        self._groups = [device_group(device, timeout, store_seconds) for _ in range(2)]

    def post(self, stage: int, operations: Sequence[tuple[bool, torch.Tensor]]) -> list[Any]:
        """Start these operations with ``stage`` together, after all that were posted before.

        Args:
            operations: pairs of whether it is a send, and the tensor.
        """
        group, rank = self._groups[min(stage, self._stage) % 2], self._rank_of(stage)
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend if is_sent else dist.irecv, tensor, rank, group=group)
                for is_sent, tensor in operations
            ]
        )
