"""What stages of the decentralised balancer tell each other, encoded as flat lists of floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_dynmo.partitioners.overload import FAILED, TARGETS, Attempt
from ds_dynmo.partitioners.stretch import RECORD_WIDTH, Room, Stretch

__all__ = ["LeftSweep", "Message", "Offer", "RightSweep", "Survey", "Verdict", "message_capacity"]

Message = list[float]


class Survey(NamedTuple):
    """What the first sweep, from the last stage to the first, collects."""

    bottleneck: float  # of the start
    largest_cost: float
    total: float
    smallest_cost: float  # of those > 0, inf if there is none
    fits: float  # 1.0 if every stage is within its limit
    speed: float  # of all together
    fastest: float
    slowest: float

    def joined(self, other: Survey) -> Survey:
        """Combine two surveys."""
        return Survey(
            max(self.bottleneck, other.bottleneck),
            max(self.largest_cost, other.largest_cost),
            self.total + other.total,
            min(self.smallest_cost, other.smallest_cost),
            min(self.fits, other.fits),
            self.speed + other.speed,
            max(self.fastest, other.fastest),
            min(self.slowest, other.slowest),
        )


class Verdict(NamedTuple):
    """Stage 0's decision on the latest pair of sweeps."""

    adopt: float  # index of the best attempt; FAILED: keep the best one before
    stop: float  # 1.0: the search is over
    bottleneck: float  # of the best partition so far, inf while none is known that fits
    start_bottleneck: float
    max_rounds: float


class RightSweep(NamedTuple):
    """The message of a sweep to the right: the right neighbour gets the layers beyond each attempt's bound."""

    verdict: Verdict
    window: Stretch  # the layers that any attempt hands on, up to the sender's last
    attempts: list[Attempt]

    @classmethod
    def handing_on(cls, verdict: Verdict, known: Stretch, stop: int, attempts: list[Attempt]) -> RightSweep:
        """Build the message from the layers of ``known`` that attempts leave up to ``stop``."""
        handed = min((attempt.bound for attempt in attempts if attempt.bound != FAILED), default=stop)
        return cls(verdict, known.part(handed, stop), attempts)

    def encoded(self) -> Message:
        """Encode as flat floats."""
        return [*self.verdict, *self.window.encoded(), *_encoded(self.attempts)]

    @classmethod
    def decoded(cls, message: Message, group_sizes: Sequence[int]) -> RightSweep:
        """Read what :meth:`encoded` wrote; ``group_sizes`` as in :meth:`Stretch.decoded`."""
        head = len(Verdict._fields)
        window, rest = Stretch.decoded(message[head:], group_sizes)
        return cls(Verdict(*message[:head]), window, Attempt.decoded(rest))


class LeftSweep(NamedTuple):
    """The message of a sweep to the left: the left neighbour gets the layers before each attempt's bound."""

    window: Stretch  # the layers that any attempt hands on, from the sender's first
    attempts: list[Attempt]

    @classmethod
    def handing_on(cls, known: Stretch, start: int, attempts: list[Attempt]) -> LeftSweep:
        """Build the message from the layers of ``known`` that attempts leave from ``start`` on."""
        handed = max((attempt.bound for attempt in attempts), default=FAILED)
        return cls(known.part(start, handed), attempts)

    def encoded(self) -> Message:
        """Encode as flat floats."""
        return [*self.window.encoded(), *_encoded(self.attempts)]

    @classmethod
    def decoded(cls, message: Message, group_sizes: Sequence[int]) -> LeftSweep:
        """Read what :meth:`encoded` wrote; ``group_sizes`` as in :meth:`Stretch.decoded`."""
        window, rest = Stretch.decoded(message, group_sizes)
        return cls(window, Attempt.decoded(rest))


class Offer(NamedTuple):
    """What a stage tells the neighbour with which it evens out its load."""

    quiet: int  # rounds since the last change that the sender knows of
    room: Room
    layers: Stretch

    def encoded(self) -> Message:
        """Encode as flat floats."""
        return [float(self.quiet), *map(float, self.room), *self.layers.encoded()]

    @classmethod
    def decoded(cls, message: Message, group_sizes: Sequence[int]) -> Offer:
        """Read what :meth:`encoded` wrote; ``group_sizes`` as in :meth:`Stretch.decoded`."""
        quiet, limit_bytes, in_flight, interval, speed, *layers = message
        room = Room(limit_bytes, int(in_flight), int(interval), speed)
        return cls(int(quiet), room, Stretch.decoded(layers, group_sizes)[0])


def message_capacity(num_layers: int) -> int:
    """Give the largest number of floats in a message of a model of ``num_layers`` layers.

    It is enough for groups of layers too: the record of a group is no longer than those of its layers.
    """
    window = 2 + num_layers * RECORD_WIDTH
    return len(Verdict._fields) + window + (TARGETS + 1) * len(Attempt._fields)


def _encoded(attempts: Sequence[Attempt]) -> Message:
    return [float(value) for attempt in attempts for value in attempt]
