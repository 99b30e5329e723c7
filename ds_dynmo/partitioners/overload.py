"""The search for the smallest bottleneck by sweeps along the chain, in which stages pass overload on.

A *target* is a bottleneck to try. In a sweep to the right each stage in turn keeps the layers from its left end that
are within the target, and passes the rest to its right neighbour. In the sweep back to the left each stage keeps the
layers from its right end that are within the target, and passes the rest to its left neighbour. If stage 0 then is
within the target, so is every stage.

Without memory limits and with equal speeds this test is exact. Stage 0 receives layers only if every stage to its right
has kept all it could, that is if ``[0, p_1)`` is the least that any partition within the target leaves for stage 0.
(The sweep to the right does not matter then: every stage has passed layers on in the sweep to the left.) So if a target
fails, no partition is within it. The largest target of every pair of sweeps is the last float below the best bottleneck
so far. Once all targets fail, that bottleneck is the smallest one.

A pair of sweeps that does not end the search narrows the bracket to at most one of :data:`TARGETS` parts. So floats
allow at most about 16 pairs: far fewer rounds than Lemma 2's bound.

With memory limits this is a heuristic: a layer cannot pass a neighbour that has no room for it, so an existing
partition may not be found. With different speeds it is a heuristic too: a target also fails if a slow stage meets a
layer that alone is too heavy for it, and a smaller target may succeed.

Several targets travel in the same sweep. The layers passed on for different targets are the ends of one run of layers,
so they travel once, with one boundary per target. No layer moves before a target is adopted.
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
        target: the bottleneck to try.
        boundary: between the sender and the receiver; :data:`FAILED` once a stage could not keep a layer.
        bottleneck: the largest load so far among stages whose layers are final.
    """

    target: float
    boundary: int
    bottleneck: float = 0.0


@dataclass(frozen=True)
class Bracket:
    """The range of bottlenecks still to search: ``[low, high)``."""

    low: float
    high: float

    @property
    def closed(self) -> bool:
        """Whether the range is empty."""
        return self.low >= self.high

    @property
    def targets(self) -> list[float]:
        """Increasing targets from ``low`` to the last float below ``high``."""
        last = math.nextafter(self.high, -math.inf)
        step = (self.high - self.low) / TARGETS
        spread = [self.low + place * step for place in range(TARGETS)]
        return sorted({min(target, last) for target in [*spread, last]})


def keep_left(known: Stretch, room: Room, stop: int, attempt: Attempt) -> Attempt:
    """Sweep to the right: keep what the target allows of layers ``[attempt.boundary, stop)``, from the left.

    A stage keeps at least one layer that fits, even above the target: the sweep to the left tests this layer.
    """
    start = attempt.boundary
    if start == FAILED:
        return attempt

    def too_much(end: int) -> bool:
        """Return whether layers up to ``end`` are too heavy or too large; if so, all larger ends are too."""
        heavy = end > start + 1 and known.load(room, start, end) > attempt.target
        return heavy or not known.fits(room, start, end)

    kept = bisect_left(range(start + 1, stop + 1), True, key=too_much)
    return attempt._replace(boundary=start + kept if kept else FAILED)


def keep_right(known: Stretch, room: Room, start: int, attempt: Attempt) -> Attempt:
    """Sweep to the left: keep what the target allows of layers ``[start, attempt.boundary)``, from the right."""
    stop = attempt.boundary
    if FAILED in (start, stop):
        return attempt._replace(boundary=FAILED)
    light = bisect_left(range(start, stop), True, key=lambda first: known.load(room, first, stop) <= attempt.target)
    first = start + light
    while first < stop and not known.fits(room, first, stop):
        first += 1
    bottleneck = max(attempt.bottleneck, known.load(room, first, stop))
    return Attempt(attempt.target, first if first < stop else FAILED, bottleneck)


def choose(bracket: Bracket, attempts: Sequence[Attempt]) -> tuple[int, Bracket]:
    """Return the attempt to adopt after a pair of sweeps, or :data:`FAILED`, and the new bracket; on stage 0.

    An attempt succeeded if its ``boundary`` is 0: stage 0 had no layer to pass on. If none succeeded, the search is
    over.
    """
    succeeded = [place for place, attempt in enumerate(attempts) if attempt.boundary == 0]
    if not succeeded:
        return FAILED, Bracket(bracket.high, bracket.high)
    best = min(succeeded, key=lambda place: attempts[place].bottleneck)
    low = attempts[succeeded[0] - 1].target if succeeded[0] > 0 else bracket.low
    return best, Bracket(low, attempts[best].bottleneck)
