"""The fast case of the simulator: DeepSpeed's 1F1B (``TrainSchedule``) of many pipelines at once.

:func:`iteration_seconds` computes for thousands of partitions what :func:`ds_dynmo.schedules.replay` gives for one, to
the bit. It also knows two other ways of sending, which only DeepSpeed's schedule has, as they depend on its steps.

The schedule gives each pass a step: forward ``m`` of stage ``s`` is step ``s + 2 m``, backward ``m`` is step
``2 N - 1 - s + 2 m``. A pass waits for what its stage did before and for its neighbour's pass of the step before:

    step      0   1   2   3   4   5   6   7
    stage 0   F0      F1  B0  F2  B1      B2
    stage 1       F0  B0  F1  B1  F2  B2

The results of one step are sent at the beginning of the next, between a stage with a backward pass and its successor
with a forward pass: first the gradient (SendGrad, RecvGrad), then the activation (SendActivation, RecvActivation). So a
stage that waits for a gradient sends its activation only afterwards, and where a send ends with its receipt, early
stages cannot run ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_dynmo.schedules.costs import PassCosts
from ds_dynmo.schedules.one_f_one_b import one_f_one_b
from ds_dynmo.schedules.replay import ScheduleTimeline, replay

__all__ = ["Sends", "iteration_seconds", "simulate"]

Sends = Literal["overlapped", "buffered", "rendezvous"]
Floats = npt.NDArray[np.float64]


class _Step(NamedTuple):
    """The stages that take part in one step; each slice has every other one."""

    gradients: tuple[slice, slice]  # receivers, senders
    activations: tuple[slice, slice]  # senders, receivers
    forwards: slice
    backwards: slice
    full: bool  # every stage has a pass


@lru_cache(maxsize=64)
def _steps(num_stages: int, micro_batches: int) -> tuple[_Step, ...]:
    span = 2 * (micro_batches - 1)

    def stages(low: int, high: int, step: int) -> range:
        low = max(low, 0)
        return range(low + (low + step) % 2, min(high, num_stages - 1) + 1, 2)

    def every_other(chosen: range, by: int = 0) -> slice:
        return slice(chosen.start + by, max(chosen.stop, chosen.start) + by, 2)

    steps = []
    forwarded = went_back = range(0)  # in the step before
    for step in range(2 * (micro_batches + num_stages - 1)):
        reach = 2 * num_stages - 1 - step
        forwards, backwards = stages(step - span, step, step), stages(reach, reach + span, step + 1)
        senders = range(forwarded.start, min(forwarded.stop, num_stages - 1), 2)
        givers = range(went_back.start or 2, went_back.stop, 2)
        steps.append(
            _Step(
                (every_other(givers, -1), every_other(givers)),
                (every_other(senders), every_other(senders, 1)),
                every_other(forwards),
                every_other(backwards),
                len(forwards) + len(backwards) == num_stages,
            )
        )
        forwarded, went_back = forwards, backwards
    return tuple(steps)


def _run(
    forward: Floats,
    backward: Floats,
    micro_batches: int,
    links: Floats | None,
    sends: Sends,
    record: Callable[[_Step, Floats], None] | None = None,
) -> Floats:
    """Compute when each stage is done. Arrays are ``[num_stages, ...]``, ``links`` one fewer (None: no time)."""
    num_stages = len(forward)
    free_at = np.zeros_like(forward)
    pairs = [(free_at[first : num_stages - 1 : 2], free_at[first + 1 :: 2]) for first in (0, 1)]
    everyone = [forward.copy(), backward.copy()]  # the seconds of a step in which every stage has a pass
    everyone[0][1::2], everyone[1][1::2] = backward[1::2], forward[1::2]
    for number, step in enumerate(_steps(num_stages, micro_batches)):
        (to, giver), (sender, receiver), forwards, backwards, full = step
        if sends == "rendezvous":
            # All pairs of the step wait for each other, also those without a message: that never delays them.
            early, late = pairs[(number + 1) % 2]
            np.maximum(early, late, out=early)
            if links is not None:
                free_at[to] += links[to]
                free_at[sender] += links[sender]
            late[...] = early
        else:
            left_at = free_at.copy() if sends == "overlapped" else free_at
            for source, target, link in ((giver, to, to), (sender, receiver, sender)):
                arrived = left_at[source] + links[link] if links is not None else left_at[source]
                free_at[target] = np.maximum(free_at[target], arrived)
        if record is not None:
            record(step, free_at)
        if full:
            free_at += everyone[number % 2]
        else:
            free_at[forwards] += forward[forwards]
            free_at[backwards] += backward[backwards]
    return free_at


def simulate(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    link_seconds: float | Sequence[float] = 0.0,
    *,
    sends: Sends = "overlapped",
) -> ScheduleTimeline:
    """Compute the exact 1F1B timeline: a pass starts as soon as its stage is free and its input has arrived.

    Args:
        forward, backward: per stage, seconds per micro-batch.
        micro_batches: per iteration.
        link_seconds: of a message between neighbours; one number, or one per boundary.
        sends: "overlapped": a message leaves by itself at the end of its pass and costs no compute time.
            "buffered": it leaves when the next step of the schedule sends it, and the sender goes on at once.
            "rendezvous": the same, but the sender goes on when it has been received, as with gloo.

    >>> simulate([1.0, 1.0], [2.0, 2.0], micro_batches=2).iteration_seconds
    9.0

    Raises:
        ValueError: different numbers of forward and backward times, a wrong number of links, no stage or no
            micro-batch.
        ScheduleError: negative or non-finite seconds.
    """
    num_stages = len(forward)
    links = _checked_links(num_stages, len(backward), micro_batches, link_seconds)
    schedule = one_f_one_b(num_stages, micro_batches)
    between = 0.0 if links is None else links[:, 0].tolist()
    costs = PassCosts.chain(forward, backward, [0.0] * num_stages, backward, between)
    if sends == "overlapped":
        return replay(schedule, costs)
    starts: list[list[float]] = [[] for _ in forward]

    def record(step: _Step, free_at: Floats) -> None:
        for stages in (step.forwards, step.backwards):
            for stage in range(num_stages)[stages]:
                starts[stage].append(float(free_at[stage, 0]))

    ahead, back = (np.array(seconds)[:, None] for seconds in (costs.forward_seconds, costs.backward_seconds))
    _run(ahead, back, micro_batches, links, sends, record)
    return ScheduleTimeline.of(schedule, starts, costs)


def iteration_seconds(
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    micro_batches: int,
    link_seconds: float | Sequence[float] = 0.0,
    *,
    sends: Sends = "overlapped",
) -> Floats:
    """Compute the ``iteration_seconds`` of :func:`simulate` for many pipelines at once.

    Args:
        forward, backward: ``[num_stages, ...]``; the further axes are pipelines.

    Returns:
        Seconds, in the shape of the further axes.
    """
    ahead, back = (np.ascontiguousarray(times, dtype=np.float64) for times in (forward, backward))
    links = _checked_links(len(ahead), len(back), micro_batches, link_seconds)
    if links is not None:
        links = links.reshape(-1, *(1,) * (ahead.ndim - 1))
    done: Floats = _run(ahead, back, micro_batches, links, sends).max(axis=0)
    return done


def _checked_links(
    num_stages: int, num_backward: int, micro_batches: int, link_seconds: float | Sequence[float]
) -> Floats | None:
    """Give the seconds of each link, ``[num_stages - 1, 1]``; None if all are 0."""
    if num_backward != num_stages or num_stages < 1 or micro_batches < 1:
        raise ValueError(
            "simulate needs one forward and one backward time for each stage and at least 1 micro-batch, "
            f"got {num_stages} forward times, {num_backward} backward times, {micro_batches} micro-batches"
        )
    links = np.asarray(link_seconds, dtype=np.float64)
    if links.ndim and len(links) != num_stages - 1:
        raise ValueError(f"{num_stages} stages have {num_stages - 1} links between them, got {len(links)} link times")
    return np.broadcast_to(links, num_stages - 1)[:, None] if links.any() else None
