"""What stages say to each other in the decentralised balancer, and how it becomes flat lists of floats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ds_dynmo.partitioners.overload import FAILED, TARGETS, Attempt, Bracket
from ds_dynmo.partitioners.stretch import RECORD_WIDTH, Stretch

__all__ = ["LeftSweep", "Message", "Offer", "RightSweep", "Survey", "Verdict", "message_capacity"]

Message = list[float]


class Survey(NamedTuple):
    """What the first sweep collects, from the last stage to the first."""

    bottleneck: float  # of the partition that they start from
    largest_cost: float
    total: float
    smallest_cost: float  # of those > 0, inf if there is none
    fits: float  # 1.0 if every stage is within its limit
    speed: float  # of all together
    fastest: float
    slowest: float

    def joined(self, other: Survey) -> Survey:
        """Survey both."""
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
    """Stage 0's verdict on the sweeps before."""

    adopt: float  # place of the attempt that is the best so far; FAILED: what was, stays
    stop: float  # 1.0: the search is over
    low: float
    high: float
    reached: float  # 1.0: high is the bottleneck of a partition that fits
    max_rounds: float
    start_bottleneck: float

    @property
    def bracket(self) -> Bracket:
        """Between what the least bottleneck lies."""
        return Bracket(self.low, self.high, bool(self.reached))


class RightSweep(NamedTuple):
    """From a stage to its right neighbour, which is handed the layers beyond each attempt's bound."""

    verdict: Verdict
    window: Stretch  # the layers that any attempt hands on, up to the sender's last
    attempts: list[Attempt]

    @classmethod
    def handing_on(cls, verdict: Verdict, known: Stretch, stop: int, attempts: list[Attempt]) -> RightSweep:
        """Hand on what attempts leave of ``known`` up to ``stop``."""
        handed = min((attempt.bound for attempt in attempts if attempt.bound != FAILED), default=stop)
        return cls(verdict, known.part(handed, stop), attempts)

    def encoded(self) -> Message:
        """Flat floats."""
        return [*self.verdict, *self.window.encoded(), *_encoded(self.attempts)]

    @classmethod
    def decoded(cls, message: Message, group_sizes: Sequence[int]) -> RightSweep:
        """Read what :meth:`encoded` wrote; ``group_sizes`` as in :meth:`Stretch.decoded`."""
        head = len(Verdict._fields)
        window, rest = Stretch.decoded(message[head:], group_sizes)
        return cls(Verdict(*message[:head]), window, Attempt.decoded(rest))


class LeftSweep(NamedTuple):
    """From a stage to its left neighbour, which is handed the layers before each attempt's bound."""

    window: Stretch  # the layers that any attempt hands on, from the sender's first
    attempts: list[Attempt]

    @classmethod
    def handing_on(cls, known: Stretch, start: int, attempts: list[Attempt]) -> LeftSweep:
        """Hand on what attempts leave of ``known`` from ``start``."""
        handed = max((attempt.bound for attempt in attempts), default=FAILED)
        return cls(known.part(start, handed), attempts)

    def encoded(self) -> Message:
        """Flat floats."""
        return [*self.window.encoded(), *_encoded(self.attempts)]

    @classmethod
    def decoded(cls, message: Message, group_sizes: Sequence[int]) -> LeftSweep:
        """Read what :meth:`encoded` wrote; ``group_sizes`` as in :meth:`Stretch.decoded`."""
        window, rest = Stretch.decoded(message, group_sizes)
        return cls(window, Attempt.decoded(rest))


class Offer(NamedTuple):
    """What a stage tells the neighbour with which it evens out."""

    quiet: int  # rounds since something changed, as far as the sender has heard
    limit_bytes: float
    speed: float
    layers: Stretch

    def encoded(self) -> Message:
        """Flat floats."""
        return [float(self.quiet), self.limit_bytes, self.speed, *self.layers.encoded()]

    @classmethod
    def decoded(cls, message: Message, group_sizes: Sequence[int]) -> Offer:
        """Read what :meth:`encoded` wrote; ``group_sizes`` as in :meth:`Stretch.decoded`."""
        quiet, limit_bytes, speed, *layers = message
        return cls(int(quiet), limit_bytes, speed, Stretch.decoded(layers, group_sizes)[0])


def message_capacity(num_layers: int) -> int:
    """Give the most floats that a message between two stages of a model of ``num_layers`` holds.

    It holds for groups of them too: of two layers or more, what a group says is no longer than what they would.
    """
    window = 2 + num_layers * RECORD_WIDTH
    return len(Verdict._fields) + window + (TARGETS + 1) * len(dataclasses.fields(Attempt))


def _encoded(attempts: Sequence[Attempt]) -> Message:
    return [value for attempt in attempts for value in attempt.encoded()]
