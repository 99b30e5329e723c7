"""Messages between stages of the diffusion balancer, encoded as flat lists of floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_dynmo.partitioners.overload import FAILED, TARGETS, Attempt
from ds_dynmo.partitioners.stretch import LAYER_FLOATS, Room, Stretch

__all__ = ["LeftSweep", "Message", "Offer", "PipelineSurvey", "RightSweep", "SearchVerdict", "message_capacity"]

Message = list[float]


class PipelineSurvey(NamedTuple):
    """Figures of the pipeline, which the first sweep collects from the last stage to the first."""

    bottleneck: float  # of the start
    largest_cost: float
    total: float
    smallest_cost: float  # the smallest one > 0; inf if there is none
    fits: float  # 1.0 if every stage is within its limit
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
            min(self.fits, other.fits),
            self.speed + other.speed,
            max(self.fastest, other.fastest),
            min(self.slowest, other.slowest),
        )


class SearchVerdict(NamedTuple):
    """Stage 0's decision on the latest pair of sweeps."""

    adopt: float  # index of the best attempt; FAILED: keep the best earlier one
    stop: float  # 1.0: the search is over
    bottleneck: float  # of the best partition so far; inf until one that fits is found
    start_bottleneck: float
    max_rounds: float


class RightSweep(NamedTuple):
    """The message of a sweep to the right: the right neighbour gets the layers beyond each attempt's boundary."""

    verdict: SearchVerdict
    window: Stretch  # all layers that any attempt passes on, up to the sender's last
    attempts: list[Attempt]

    @classmethod
    def handing_on(cls, verdict: SearchVerdict, known: Stretch, stop: int, attempts: list[Attempt]) -> RightSweep:
        """Build the message from the layers of ``known`` up to ``stop`` that attempts pass on."""
        first = min((attempt.boundary for attempt in attempts if attempt.boundary != FAILED), default=stop)
        return cls(verdict, known.part(first, stop), attempts)

    def encoded(self) -> Message:
        """Encode as flat floats."""
        return [*self.verdict, *self.window.encoded(), *_encoded(self.attempts)]

    @classmethod
    def decoded(cls, message: Message, group_sizes: Sequence[int]) -> RightSweep:
        """Decode what :meth:`encoded` returned; ``group_sizes`` as in :meth:`Stretch.decoded`."""
        head = len(SearchVerdict._fields)
        window, rest = Stretch.decoded(message[head:], group_sizes)
        return cls(SearchVerdict(*message[:head]), window, Attempt.decoded(rest))


class LeftSweep(NamedTuple):
    """The message of a sweep to the left: the left neighbour gets the layers before each attempt's boundary."""

    window: Stretch  # all layers that any attempt passes on, from the sender's first
    attempts: list[Attempt]

    @classmethod
    def handing_on(cls, known: Stretch, start: int, attempts: list[Attempt]) -> LeftSweep:
        """Build the message from the layers of ``known`` from ``start`` on that attempts pass on."""
        end = max((attempt.boundary for attempt in attempts), default=FAILED)
        return cls(known.part(start, end), attempts)

    def encoded(self) -> Message:
        """Encode as flat floats."""
        return [*self.window.encoded(), *_encoded(self.attempts)]

    @classmethod
    def decoded(cls, message: Message, group_sizes: Sequence[int]) -> LeftSweep:
        """Decode what :meth:`encoded` returned; ``group_sizes`` as in :meth:`Stretch.decoded`."""
        window, rest = Stretch.decoded(message, group_sizes)
        return cls(window, Attempt.decoded(rest))


class Offer(NamedTuple):
    """The message to the neighbour with which a stage evens out its load."""

    quiet: int  # rounds since the last change that the sender knows of
    room: Room
    layers: Stretch

    def encoded(self) -> Message:
        """Encode as flat floats."""
        return [float(self.quiet), *map(float, self.room), *self.layers.encoded()]

    @classmethod
    def decoded(cls, message: Message, group_sizes: Sequence[int]) -> Offer:
        """Decode what :meth:`encoded` returned; ``group_sizes`` as in :meth:`Stretch.decoded`."""
        quiet, limit_bytes, in_flight, interval, speed, *layers = message
        room = Room(limit_bytes, int(in_flight), int(interval), speed)
        return cls(int(quiet), room, Stretch.decoded(layers, group_sizes)[0])


def message_capacity(num_layers: int) -> int:
    """Return the largest number of floats in a message about ``num_layers`` layers.

    This holds for groups of layers too: the entry of a group is not longer than those of its layers.
    """
    window = 2 + num_layers * LAYER_FLOATS
    return len(SearchVerdict._fields) + window + (TARGETS + 1) * len(Attempt._fields)


def _encoded(attempts: Sequence[Attempt]) -> Message:
    return [float(value) for attempt in attempts for value in attempt]
