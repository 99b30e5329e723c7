"""Messages between neighbouring stages of the diffusion balancer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_dynmo.partitioners.overload import FAILED, Attempt
from ds_dynmo.partitioners.stretch import Room, Stretch

__all__ = ["LeftSweep", "Message", "Offer", "PipelineSurvey", "RightSweep", "SearchVerdict"]


class PipelineSurvey(NamedTuple):
    """Figures of the pipeline, which the first sweep collects from the last stage to the first."""

    bottleneck: float  # of the start
    largest_cost: float
    total: float
    smallest_cost: float  # the smallest one > 0; inf if there is none
    fits: bool  # whether every stage is within its limit
    speed: float  # sum over stages
    fastest: float
    slowest: float

    def joined(self, other: PipelineSurvey) -> PipelineSurvey:
        """Combine two surveys."""
        return PipelineSurvey(
            max(self.bottleneck, other.bottleneck),
            max(self.largest_cost, other.largest_cost),
            self.total + other.total,
            min(self.smallest_cost, other.smallest_cost),
            self.fits and other.fits,
            self.speed + other.speed,
            max(self.fastest, other.fastest),
            min(self.slowest, other.slowest),
        )


class SearchVerdict(NamedTuple):
    """Stage 0's decision on the latest pair of sweeps."""

    adopt: int  # index of the best attempt; FAILED: keep the best earlier one
    stop: bool  # whether the search is over
    bottleneck: float  # of the best partition so far; inf until one that fits is found
    start_bottleneck: float
    max_rounds: int


class RightSweep(NamedTuple):
    """The message of a sweep to the right: the right neighbour gets the layers beyond each attempt's boundary."""

    verdict: SearchVerdict
    window: Stretch  # all layers that any attempt passes on, up to the sender's last
    attempts: Sequence[Attempt]

    @classmethod
    def handing_on(cls, verdict: SearchVerdict, known: Stretch, stop: int, attempts: Sequence[Attempt]) -> RightSweep:
        """Build the message from the layers of ``known`` up to ``stop`` that attempts pass on."""
        first = min((attempt.boundary for attempt in attempts if attempt.boundary != FAILED), default=stop)
        return cls(verdict, known.part(first, stop), attempts)


class LeftSweep(NamedTuple):
    """The message of a sweep to the left: the left neighbour gets the layers before each attempt's boundary."""

    window: Stretch  # all layers that any attempt passes on, from the sender's first
    attempts: Sequence[Attempt]

    @classmethod
    def handing_on(cls, known: Stretch, start: int, attempts: Sequence[Attempt]) -> LeftSweep:
        """Build the message from the layers of ``known`` from ``start`` on that attempts pass on."""
        end = max((attempt.boundary for attempt in attempts), default=FAILED)
        return cls(known.part(start, end), attempts)


class Offer(NamedTuple):
    """The message to the neighbour with which a stage evens out its load."""

    quiet: int  # rounds since the last change that the sender knows of
    room: Room
    layers: Stretch


Message = PipelineSurvey | RightSweep | LeftSweep | Offer
