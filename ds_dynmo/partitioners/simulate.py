"""The timeline of one training iteration under DeepSpeed's 1F1B schedule (``TrainSchedule``).

The schedule gives each pass a step: forward ``m`` of stage ``s`` is step ``s + 2 m``, backward ``m`` is step
``2 N - 1 - s + 2 m``. A pass waits for what its stage did before and for its neighbour's pass of the step before:

    step      0   1   2   3   4   5   6   7
    stage 0   F0      F1  B0  F2  B1      B2
    stage 1       F0  B0  F1  B1  F2  B2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Pass", "Timeline", "simulate"]


class Pass(NamedTuple):
    """One forward or backward pass of one micro-batch through one stage."""

    stage: int
    micro_batch: int
    kind: Literal["forward", "backward"]
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """One iteration.

    Attributes:
        iteration_seconds: from the first pass's start to the last one's end.
        busy_seconds: per stage, in passes.
        passes: every pass, in the order of the schedule's steps.
    """

    iteration_seconds: float
    busy_seconds: tuple[float, ...]
    passes: tuple[Pass, ...]

    @property
    def bubble_ratio(self) -> float:
        """The share of ``num_stages`` x ``iteration_seconds`` in which no pass runs."""
        if self.iteration_seconds == 0:
            return 0.0
        capacity_seconds = len(self.busy_seconds) * self.iteration_seconds
        return max(0.0, (capacity_seconds - math.fsum(self.busy_seconds)) / capacity_seconds)


def schedule(num_stages: int, micro_batches: int) -> Iterator[tuple[int, int, Literal["forward", "backward"]]]:
    """Every (stage, micro_batch, kind), in the order of steps; a step's passes run on different stages."""
    for step in range(2 * (micro_batches + num_stages - 1)):
        for stage in range(num_stages):
            forward, odd = divmod(step - stage, 2)
            if not odd and 0 <= forward < micro_batches:
                yield stage, forward, "forward"
            backward, odd = divmod(step - (2 * num_stages - 1 - stage), 2)
            if not odd and 0 <= backward < micro_batches:
                yield stage, backward, "backward"


def simulate(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, link_seconds: float = 0.0
) -> Timeline:
    """The exact 1F1B timeline: each pass starts as soon as its stage is free and its input has arrived.

    Sends cost no compute time: an activation or gradient is there ``link_seconds`` after its producer's end.

    Args:
        forward, backward: per stage, seconds per micro-batch.
        micro_batches: per iteration.

    >>> simulate([1.0, 1.0], [2.0, 2.0], micro_batches=2).iteration_seconds
    9.0

    Raises:
        ValueError: unlike numbers of forward and backward times, no stage, or no micro-batch.
    """
    num_stages = len(forward)
    if len(backward) != num_stages or num_stages < 1 or micro_batches < 1:
        raise ValueError(
            "simulate needs one forward and one backward time for each stage and at least 1 micro-batch, "
            f"got {num_stages} forward times, {len(backward)} backward times, {micro_batches} micro-batches"
        )
    free_at = [0.0] * num_stages
    ended: dict[tuple[int, int, str], float] = {}
    passes = []
    for stage, micro_batch, kind in schedule(num_stages, micro_batches):
        source = (stage - 1 if kind == "forward" else stage + 1, micro_batch, kind)
        arrived = ended[source] + link_seconds if source in ended else 0.0
        start = max(free_at[stage], arrived)
        end = start + (forward[stage] if kind == "forward" else backward[stage])
        free_at[stage] = ended[stage, micro_batch, kind] = end
        passes.append(Pass(stage, micro_batch, kind, start, end))
    busy = tuple(micro_batches * (forward[stage] + backward[stage]) for stage in range(num_stages))
    return Timeline(max(free_at), busy, tuple(passes))
