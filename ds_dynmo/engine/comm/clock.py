"""Compare the clocks of ranks with rank 0's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_QUESTIONS = 10


def clock_offset(group: Any, now: Callable[[], float]) -> tuple[float, float]:
    """Measure by how many seconds this rank's clock is ahead of rank 0's, and the error bound. Collective.

    Each rank asks rank 0 for its time several times. The fastest answer counts, and half of its round trip is the error
    bound (Cristian, "Probabilistic clock synchronization", 1989).

    Args:
        group: of all ranks, on the CPU.
        now: this rank's clock, in seconds.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    question, answer = torch.zeros(2, 1, dtype=torch.float64, device="cpu")
    trips: list[tuple[float, float]] = [] if rank else [(0.0, 0.0)]
    for asking in range(1, world):
        for _ in range(_QUESTIONS if rank in (0, asking) else 0):
            if rank == 0:
                dist.recv(question, asking, group=group)
                answer[0] = now()
                dist.send(answer, asking, group=group)
            else:
                asked = now()
                dist.send(question, 0, group=group)
                dist.recv(answer, 0, group=group)
                half = (now() - asked) / 2
                trips.append((half, asked + half - answer.item()))
    error_seconds, offset_seconds = min(trips)
    return offset_seconds, error_seconds
