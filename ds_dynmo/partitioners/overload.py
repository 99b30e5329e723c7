"""Find the smallest bottleneck by sweeps along the chain in which stages pass overload on.

Given a *target*, a sweep to the right lets each stage in turn keep, from its left end, what stays within the
target and hand the rest to its right neighbour; a sweep back to the left lets each stage keep, from its
right end, what stays within the target and hand the rest to its left neighbour. If stage 0 then is within the
target, so is every stage.

This decides exactly, without memory limits: stage 0 is handed layers only if every stage to its right
up to the last kept all it could, that is if ``[0, p_1)`` is the least that any partition within the target
leaves for stage 0. (The way right does not matter then: every stage has handed on layers on the way left.) So if a
target fails, no partition is within it. The largest target of every pair of sweeps is the last float below the best
bottleneck so far. Once all of them fail, that bottleneck is the smallest one.

A pair of sweeps that does not end the search leaves at most one of :data:`TARGETS` parts of the bracket, so some 16
pairs are the most that floats allow: far fewer rounds than Lemma 2's bound.

With memory limits it is a heuristic: a layer cannot pass through a neighbour that has no room for it, so a partition
that exists may not be found. With unlike speeds it is a heuristic too: a target also fails where a slow stage meets a
layer that is too heavy for it alone, and a smaller target may succeed.

Several targets travel in the same sweep. Layers that are handed on for different targets are the ends of one run of
layers, so they travel once, with one boundary per target. No layer moves before a target is adopted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_dynmo.partitioners.stretch import Room, Stretch

__all__ = ["FAILED", "TARGETS", "Attempt", "Bracket", "choose", "keep_left", "keep_right"]

FAILED = -1
TARGETS = 16


class Attempt(NamedTuple):
    """One target on its way from stage to stage.

    Attributes:
        target: the bottleneck that is tried.
        bound: the boundary between the sender and the receiver; :data:`FAILED` once a stage could not keep a layer.
        bottleneck: the largest load so far of stages whose layers are settled.
    """

    target: float
    bound: int
    bottleneck: float = 0.0

    @classmethod
    def decoded(cls, values: Sequence[float]) -> list[Attempt]:
        """Decode all attempts in ``values``."""
        width = len(cls._fields)
        return [
            cls(values[at], int(values[at + 1]), *values[at + 2 : at + width]) for at in range(0, len(values), width)
        ]


@dataclass(frozen=True)
class Bracket:
    """The bottlenecks that are still looked for: those from ``low`` on and below ``high``."""

    low: float
    high: float

    @property
    def closed(self) -> bool:
        """Whether none is left."""
        return self.low >= self.high

    @property
    def targets(self) -> list[float]:
        """Increasing targets from ``low`` to the last float below ``high``."""
        last = math.nextafter(self.high, -math.inf)
        step = (self.high - self.low) / TARGETS
        spread = [self.low + place * step for place in range(TARGETS)]
        return sorted({min(target, last) for target in [*spread, last]})


def keep_left(known: Stretch, room: Room, stop: int, attempt: Attempt) -> Attempt:
    """Sweep to the right: keep what the target allows of layers ``[attempt.bound, stop)``, from the left.

    A stage keeps at least one layer that fits, even above the target: the way left shows whether it can keep it.
    """
    start = attempt.bound
    if start == FAILED:
        return attempt

    def too_much(end: int) -> bool:
        """Tell whether layers up to ``end`` are too heavy or too large; once they are, more of them are."""
        heavy = end > start + 1 and known.load(room, start, end) > attempt.target
        return heavy or not known.fits(room, start, end)

    kept = bisect_left(range(start + 1, stop + 1), True, key=too_much)
    return attempt._replace(bound=start + kept if kept else FAILED)


def keep_right(known: Stretch, room: Room, start: int, attempt: Attempt) -> Attempt:
    """Sweep to the left: keep what the target allows of layers ``[start, attempt.bound)``, from the right."""
    stop = attempt.bound
    if FAILED in (start, stop):
        return attempt._replace(bound=FAILED)
    light = bisect_left(range(start, stop), True, key=lambda first: known.load(room, first, stop) <= attempt.target)
    first = start + light
    while first < stop and not known.fits(room, first, stop):
        first += 1
    bottleneck = max(attempt.bottleneck, known.load(room, first, stop))
    return Attempt(attempt.target, first if first < stop else FAILED, bottleneck)


def choose(bracket: Bracket, attempts: Sequence[Attempt]) -> tuple[int, Bracket]:
    """Judge a finished pair of sweeps on stage 0: give the attempt to adopt, or :data:`FAILED`, and the new bracket.

    An attempt succeeded if its ``bound`` is 0: stage 0 had no layer to hand on. If none did, the search is over.
    """
    met = [place for place, attempt in enumerate(attempts) if attempt.bound == 0]
    if not met:
        return FAILED, Bracket(bracket.high, bracket.high)
    best = min(met, key=lambda place: attempts[place].bottleneck)
    low = attempts[met[0] - 1].target if met[0] > 0 else bracket.low
    return best, Bracket(low, attempts[best].bottleneck)
