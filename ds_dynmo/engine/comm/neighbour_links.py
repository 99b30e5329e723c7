"""Process groups for messages between neighbouring stages, for backends that run operations in the order of posting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.engine.comm.bounded import default_timeout
from ds_dynmo.engine.comm.device_group import device_group

_ROUND_TRIPS = 6  # of a measurement, of which the shortest counts; the first may connect


class NeighbourLinks:
    """Operations with the neighbouring stages, in the order of posting.

    NCCL runs all operations that a rank posts on a process group on one stream, in order, whatever their peer: batches
    always, and single operations if the default group is bound to a device, as DeepSpeed binds it. But messages with
    one neighbour must not wait for those with the other. So there are two groups, for alternate boundaries of the
    pipeline: in each of them a rank has one neighbour. In a loop the last stage and the first are neighbours too, and
    if the number of stages is odd, these two need a third group. All replicas and slices share them.

    Args:
        stage: of this rank.
        num_stages: of the pipeline.
        rank_of: returns the rank that holds a stage.
        device: the engine's device.
        store_seconds: as for :func:`device_group`.
    """

    def __init__(
        self, stage: int, num_stages: int, rank_of: Callable[[int], int], device: torch.device, store_seconds: float
    ) -> None:
        self._stage, self._num_stages, self._rank_of = stage, num_stages, rank_of
        self._device, self._store_seconds = device, store_seconds
        self._groups: list[Any] = []
        self._seconds: float | None = None  # of a message, measured

    def connect(self, *, loop: bool) -> None:
        """Make the groups that are not there yet; ``loop``: the last stage and the first are neighbours. Collective."""
        if dist.get_backend() == "gloo":
            self._groups = [None] * 3  # the default group: operations of gloo do not wait for each other
        needed = 3 if loop and self._num_stages % 2 else 2
        while len(self._groups) < needed:
            timeout = default_timeout()  # as for DeepSpeed's messages: a receive may wait for a whole pass
            self._groups.append(device_group(self._device, timeout, self._store_seconds))

    def post(self, stage: int, operations: Sequence[tuple[bool, torch.Tensor]]) -> list[Any]:
        """Start these operations with ``stage`` together, after all that were posted before.

        Args:
            operations: pairs of whether it is a send, and the tensor.
        """
        group, rank = self._groups[self._group_with(stage)], self._rank_of(stage)
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend if is_sent else dist.irecv, tensor, rank, group=group)
                for is_sent, tensor in operations
            ]
        )

    def message_seconds(self, num_bytes: Sequence[int], clock: Any) -> float:
        """Measure the seconds of messages, once: half the shortest of some round trips. Collective over a pipeline.

        All pipelines measure at once, so they share what they share while they train.

        Args:
            num_bytes: per boundary between neighbouring stages, of a message.
            clock: that of the profile.

        Returns:
            Of the boundary after this stage; 0.0 on the last stage.
        """
        if self._seconds is None:
            firsts = range(max(0, self._stage - 1), min(self._stage + 1, self._num_stages - 1))
            in_turns = sorted(firsts, key=lambda first: first % 2)  # a stage has one neighbour at a time
            self._seconds = max(self._message_seconds(first, num_bytes[first], clock) for first in in_turns)
        return self._seconds

    def _message_seconds(self, first: int, num_bytes: int, clock: Any) -> float:
        begins = first == self._stage
        message, times = torch.empty(num_bytes, dtype=torch.uint8, device=self._device), [clock.now()]
        for _ in range(_ROUND_TRIPS):
            for is_sent in (begins, not begins):
                for work in self.post(first + 1 if begins else first, [(is_sent, message)]):
                    work.wait()
            times.append(clock.now())
        return float(min(clock.seconds_between(times))) / 2 if begins else 0.0

    def _group_with(self, stage: int) -> int:
        """Return which group the messages with a neighbour use."""
        first, last = sorted((stage, self._stage))
        if last - first == 1:
            return first % 2
        return 2 if self._num_stages % 2 else 1  # around a loop
