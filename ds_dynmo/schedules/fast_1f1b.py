"""Fast simulation of DeepSpeed's 1F1B (``TrainSchedule``) for many pipelines at once.

:func:`iteration_seconds` computes, for thousands of partitions, exactly what :func:`ds_dynmo.schedules.replay` computes
for one. It also simulates two other kinds of sends, which depend on the steps of DeepSpeed's schedule.

The schedule assigns each pass a step: forward ``m`` of stage ``s`` is step ``s + 2 m``, backward ``m`` is step
``2 N - 1 - s + 2 m``. A pass waits for the earlier passes of its stage and for its neighbour's pass of the step before:

    step      0   1   2   3   4   5   6   7
    stage 0   F0      F1  B0  F2  B1      B2
    stage 1       F0  B0  F1  B1  F2  B2

The results of a step are sent at the start of the next, between a stage with a backward pass and its successor with a
forward pass: first the gradient (SendGrad, RecvGrad), then the activation (SendActivation, RecvActivation). So a stage
that waits for a gradient sends its activation only afterwards. If a send ends only when it is received, early stages
cannot run ahead.
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


class _ScheduleStep(NamedTuple):
    """Stages that send, receive or run a pass in one step; each slice selects every second stage."""

    gradients: tuple[slice, slice]  # receivers, senders
    activations: tuple[slice, slice]  # senders, receivers
    forwards: slice
    backwards: slice
    full: bool  # every stage has a pass


@lru_cache(maxsize=64)
def _steps(num_stages: int, micro_batches: int) -> tuple[_ScheduleStep, ...]:
    span = 2 * (micro_batches - 1)

    def stages(low: int, high: int, step: int) -> range:
        low = max(low, 0)
        return range(low + (low + step) % 2, min(high, num_stages - 1) + 1, 2)

    def every_other(chosen: range, by: int = 0) -> slice:
        return slice(chosen.start + by, max(chosen.stop, chosen.start) + by, 2)

    steps = []
    forwarded = went_back = range(0)  # stages with such a pass in the step before
    for step in range(2 * (micro_batches + num_stages - 1)):
        reach = 2 * num_stages - 1 - step
        forwards, backwards = stages(step - span, step, step), stages(reach, reach + span, step + 1)
        senders = range(forwarded.start, min(forwarded.stop, num_stages - 1), 2)
        givers = range(went_back.start or 2, went_back.stop, 2)
        steps.append(
            _ScheduleStep(
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
    record: Callable[[_ScheduleStep, Floats], None] | None = None,
) -> Floats:
    """Compute the end of each stage's last pass. Arrays are ``[num_stages, ...]``; ``links`` has one stage fewer."""
    num_stages = len(forward)
    free_at = np.zeros_like(forward)
    pairs = [(free_at[first : num_stages - 1 : 2], free_at[first + 1 :: 2]) for first in (0, 1)]
    full_step = [forward.copy(), backward.copy()]  # seconds of a step in which every stage has a pass, by parity
    full_step[0][1::2], full_step[1][1::2] = backward[1::2], forward[1::2]
    for number, step in enumerate(_steps(num_stages, micro_batches)):
        (to, giver), (sender, receiver), forwards, backwards, full = step
        if sends == "rendezvous":
            # Let pairs without a message wait for each other too: that never delays them.
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
            free_at += full_step[number % 2]
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
    """Compute the 1F1B timeline: a pass starts as soon as its stage is free and its input has arrived.

    Args:
        forward, backward: per stage, seconds per micro-batch.
        micro_batches: per iteration.
        link_seconds: of a message between neighbours; one number, or one per boundary.
        sends: "overlapped": a message leaves at the end of its pass and costs no compute time.
            "buffered": it leaves in the next step of the schedule, and the sender continues at once.
            "rendezvous": it leaves in the next step, and the sender waits until it is received, as with gloo.

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
    seconds_of_links = 0.0 if links is None else links[:, 0].tolist()
    costs = PassCosts.chain(forward, backward, [0.0] * num_stages, backward, seconds_of_links)
    if sends == "overlapped":
        return replay(schedule, costs)
    starts: list[list[float]] = [[] for _ in forward]

    def record(step: _ScheduleStep, free_at: Floats) -> None:
        for stages in (step.forwards, step.backwards):
            for stage in range(num_stages)[stages]:
                starts[stage].append(float(free_at[stage, 0]))

    forwards, backwards = (np.array(seconds)[:, None] for seconds in (costs.forward_seconds, costs.backward_seconds))
    _run(forwards, backwards, micro_batches, links, sends, record)
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
    forwards, backwards = (np.ascontiguousarray(times, dtype=np.float64) for times in (forward, backward))
    links = _checked_links(len(forwards), len(backwards), micro_batches, link_seconds)
    if links is not None:
        links = links.reshape(-1, *(1,) * (forwards.ndim - 1))
    done: Floats = _run(forwards, backwards, micro_batches, links, sends).max(axis=0)
    return done


def _checked_links(
    num_stages: int, num_backward: int, micro_batches: int, link_seconds: float | Sequence[float]
) -> Floats | None:
    """Return the seconds of each link, ``[num_stages - 1, 1]``; None if all are 0."""
    if num_backward != num_stages or num_stages < 1 or micro_batches < 1:
        raise ValueError(
            "simulate needs one forward and one backward time for each stage and at least 1 micro-batch, "
            f"got {num_stages} forward times, {num_backward} backward times, {micro_batches} micro-batches"
        )
    links = np.asarray(link_seconds, dtype=np.float64)
    if links.ndim and len(links) != num_stages - 1:
        raise ValueError(f"{num_stages} stages have {num_stages - 1} links between them, got {len(links)} link times")
    return np.broadcast_to(links, num_stages - 1)[:, None] if links.any() else None
