"""Find the smallest bottleneck by sweeps along the chain in which stages pass overload on.

Given a *target*, a sweep to the right lets each stage in turn keep, from its left end, what stays within the
target and hand the rest to its right neighbour; a sweep back to the left lets each stage keep, from its
right end, what stays within the target and hand the rest to its left neighbour. If stage 0 then is within the
target, so is every stage.

This decides exactly, without memory limits: stage 0 is handed layers only if every stage to its right
up to the last kept all it could, that is if ``[0, p_1)`` is the least that any partition within the target
leaves for stage 0. If a target fails, so does every other up to the *next* one: the smallest sum at which
some stage would have kept one layer more on the way left. (The way right does not matter then: every stage has handed
on layers on the way left.)

With memory limits it is a heuristic: a layer cannot pass through a neighbour that has no room for it, so a partition
that exists may not be found. With unlike speeds it is a heuristic too: a target also fails where a slow stage meets a
layer that is too heavy for it alone, and a target smaller than the *next* one may succeed.

Several targets travel in the same sweep. Layers that are handed on for different targets are the ends of one run of
layers, so they travel once, with one boundary per target. No layer moves before a target is adopted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynmo.partitioners.stretch import Room, Stretch

__all__ = ["FAILED", "TARGETS", "Attempt", "Bracket", "choose", "keep_left", "keep_right", "pick_targets"]

FAILED = -1
TARGETS = 16


@dataclass(frozen=True)
class Attempt:
    """One target on its way from stage to stage.

    Attributes:
        target: the bottleneck that is tried.
        bound: the boundary between the sender and the receiver; :data:`FAILED` once a stage could not keep a layer.
        next_target: on the way left, the smallest larger target at which a stage would have kept one layer more.
        bottleneck: the largest load so far of stages whose layers are settled.
    """

    target: float
    bound: int
    next_target: float = math.inf
    bottleneck: float = 0.0

    def encoded(self) -> list[float]:
        return [self.target, float(self.bound), self.next_target, self.bottleneck]

    @classmethod
    def decoded(cls, values: Sequence[float]) -> list[Attempt]:
        """Decode all attempts in ``values``."""
        return [cls(values[at], int(values[at + 1]), *values[at + 2 : at + 4]) for at in range(0, len(values), 4)]


@dataclass(frozen=True)
class Bracket:
    """The range of the smallest bottleneck: sweeps find none below ``low``, and one at ``high``.

    While ``reached`` is False no partition that fits is known, and ``high`` is only an upper bound.
    """

    low: float
    high: float
    reached: bool

    @property
    def closed(self) -> bool:
        return self.low >= self.high if self.reached else self.low == math.inf


def pick_targets(bracket: Bracket) -> list[float]:
    """Choose increasing targets from ``low`` to the last float below ``high`` (``high`` itself, if not reached)."""
    step = (bracket.high - bracket.low) / TARGETS
    last = math.nextafter(bracket.high, -math.inf) if bracket.reached else bracket.high
    spread = [bracket.low + place * step for place in range(TARGETS)]
    return sorted({min(target, last) for target in [*spread, last]})


def keep_left(known: Stretch, room: Room, stop: int, attempt: Attempt) -> Attempt:
    """Sweep to the right: keep what the target allows of layers ``[attempt.bound, stop)``, from the left.

    A stage keeps at least one layer that fits, even above the target: the way left shows whether it can keep it.
    """
    start = attempt.bound
    if start == FAILED:
        return attempt
    low, high = start, stop
    while low < high:  # the largest end; load and bytes never fall as it grows
        middle = (low + high + 1) // 2
        light = middle == start + 1 or known.load(room, start, middle) <= attempt.target
        if light and known.fits(room, start, middle):
            low = middle
        else:
            high = middle - 1
    return Attempt(attempt.target, low if low > start else FAILED)


def keep_right(known: Stretch, room: Room, start: int, attempt: Attempt) -> Attempt:
    """Sweep to the left: keep what the target allows of layers ``[start, attempt.bound)``, from the right."""
    stop = attempt.bound
    if stop == FAILED or start == FAILED:
        return Attempt(attempt.target, FAILED, attempt.next_target)
    low, high = start, stop
    while low < high:  # the smallest start that is light enough
        middle = (low + high) // 2
        if known.load(room, middle, stop) <= attempt.target:
            high = middle
        else:
            low = middle + 1
    light = low
    while low < stop and not known.fits(room, low, stop):
        low += 1
    next_target = attempt.next_target
    if start < low == light and known.fits(room, low - 1, stop):
        next_target = min(next_target, known.load(room, low - 1, stop))
    bottleneck = max(attempt.bottleneck, known.load(room, low, stop))
    return Attempt(attempt.target, low if low < stop else FAILED, next_target, bottleneck)


def choose(bracket: Bracket, attempts: Sequence[Attempt]) -> tuple[int, Bracket]:
    """Judge a finished pair of sweeps on stage 0: give the attempt to adopt, or :data:`FAILED`, and the new bracket.

    An attempt succeeded if its ``bound`` is 0: stage 0 had no layer to hand on.
    """
    met = [place for place, attempt in enumerate(attempts) if attempt.bound == 0]
    first = met[0] if met else len(attempts)
    low = max([bracket.low, *(attempt.next_target for attempt in attempts[:first])])
    if not met:
        return FAILED, Bracket(low, bracket.high, bracket.reached)
    best = min(met, key=lambda place: attempts[place].bottleneck)
    return best, Bracket(low, attempts[best].bottleneck, True)
