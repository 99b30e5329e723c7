"""Fast simulation of 1F1B on a chain, for many pipelines at once.

:func:`iteration_seconds` computes, for thousands of partitions, exactly what :func:`simulate` computes for one. It
takes a step at a time: forward ``m`` of stage ``s`` of ``p`` is step ``s + 2 m``, backward ``m`` is step
``2 p - 1 - s + 2 m``. A pass waits for the earlier passes of its stage and for its neighbour's pass of the step before:

    step      0   1   2   3   4   5   6   7
    stage 0   F0      F1  B0  F2  B1      B2
    stage 1       F0  B0  F1  B1  F2  B2
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules.costs import PassCosts
from ds_dynmo.schedules.one_f_one_b import one_f_one_b
from ds_dynmo.schedules.replay import ScheduleTimeline, replay

__all__ = ["iteration_seconds", "simulate"]

Floats = npt.NDArray[np.float64]


def simulate(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, link_seconds: float | Sequence[float] = 0.0
) -> ScheduleTimeline:
    """Simulate 1F1B on a chain: :func:`replay` for backward passes in one.

    Args:
        forward, backward: per stage, seconds per micro-batch.
        micro_batches: per iteration.
        link_seconds: of a message between neighbours; one number, or one per boundary.

    >>> simulate([1.0, 1.0], [2.0, 2.0], micro_batches=2).iteration_seconds
    9.0

    Raises:
        ScheduleError: different numbers of forward and backward times, a wrong number of links, no stage or no
            micro-batch, negative or non-finite seconds.
    """
    costs = PassCosts.chain(forward, backward, [0.0] * len(backward), backward, link_seconds)
    return replay(one_f_one_b(len(forward), micro_batches), costs)


def iteration_seconds(
    forward: npt.ArrayLike, backward: npt.ArrayLike, micro_batches: int, link_seconds: float | Sequence[float] = 0.0
) -> Floats:
    """Compute the ``iteration_seconds`` of :func:`simulate` for many pipelines at once.

    Args:
        forward, backward: ``[num_stages, ...]``; the further axes are pipelines.

    Returns:
        Seconds, in the shape of the further axes.

    Raises:
        ScheduleError: a wrong number of links.
    """
    ahead, back = np.asarray(forward, dtype=np.float64), np.asarray(backward, dtype=np.float64)
    stages, span = len(ahead), 2 * (micro_batches - 1)
    if np.shape(link_seconds) not in ((), (stages - 1,)):
        raise ScheduleError(f"{stages} stages have {stages - 1} links between them, got {np.size(link_seconds)}")
    links = np.zeros((stages + 1, *(1,) * (ahead.ndim - 1)))  # before each stage, and after the last one
    links[1:-1].T[...] = link_seconds
    ends = np.zeros((stages + 2, *ahead.shape[1:]))  # of the latest pass of stage s, at s + 1; nothing runs around them
    before, own, after = ends[:-2], ends[1:-1], ends[2:]
    for step in range(2 * (micro_batches + stages - 1)):
        reach = 2 * stages - 1 - step
        low, high = max(step - span, step % 2), max(reach, reach % 2)
        forwards, backwards = slice(low, step + 1, 2), slice(high, max(reach + span + 1, 0), 2)
        inputs, gradients = before[forwards] + links[:-1][forwards], after[backwards] + links[1:][backwards]
        own[forwards] = np.maximum(own[forwards], inputs) + ahead[forwards]
        own[backwards] = np.maximum(own[backwards], gradients) + back[backwards]
    done: Floats = ends.max(axis=0)
    return done
