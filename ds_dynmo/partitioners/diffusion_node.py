"""One stage's part in the decentralised balancer: a state machine that is fed its two neighbours' messages.

Every stage runs a :class:`DiffusionNode` and nothing else; a round is one hop of messages. There are two parts:

1. *Overload is passed on* (module ``overload``). One sweep from the last stage to the first collects the
   largest and the summed load. Then stage 0 starts pairs of sweeps, right and back left, each of which tries
   several targets for the bottleneck; the next sweep to the right carries its verdict. The last one says
   stop, and when it has reached the last stage every stage takes on the layers it kept for the best target.
2. *Neighbours even out* (:func:`diffusion_step`). In turn, the pairs (0, 1), (2, 3), ... and (1, 2), (3, 4), ...
   tell each other their layers, and both come to the same new boundary: the one that makes the heavier of
   the two lightest. Each such step lowers the paper's potential, if the two are equally fast, and never raises a
   bottleneck.

The end is decentralised too. A stage's quiet counter is 0 after a round in which it changed, else one more
than the smaller of its own and its partner's. The pairs of two rounds cover every boundary, so two rounds
without a change are the end, and news of a change takes at most ``num_stages - 2`` rounds to reach every stage:
no counter can pass ``num_stages + 1`` early, and all do so in the same round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from ds_dynmo.partitioners.diffusion_step import diffusion_step, lemma2_bound
from ds_dynmo.partitioners.memory import StageMemory
from ds_dynmo.partitioners.overload import (
    FAILED,
    TARGETS,
    Attempt,
    Bracket,
    choose,
    keep_left,
    keep_right,
    pick_targets,
)
from ds_dynmo.partitioners.stretch import RECORD_WIDTH, LayerRecord, Room, Stretch

__all__ = ["DiffusionNode", "message_capacity"]

Message = list[float]


class _Survey(NamedTuple):
    """What the first sweep collects, from the last stage to the first."""

    bottleneck: float  # of the partition that they start from
    largest_cost: float
    total: float
    smallest_cost: float  # of those > 0, inf if there is none
    fits: float  # 1.0 if every stage is within its limit
    speed: float  # of all together
    fastest: float
    slowest: float

    def joined(self, other: _Survey) -> _Survey:
        return _Survey(
            max(self.bottleneck, other.bottleneck),
            max(self.largest_cost, other.largest_cost),
            self.total + other.total,
            min(self.smallest_cost, other.smallest_cost),
            min(self.fits, other.fits),
            self.speed + other.speed,
            max(self.fastest, other.fastest),
            min(self.slowest, other.slowest),
        )


class _Verdict(NamedTuple):
    """The head of a sweep to the right: stage 0's verdict on the sweeps before."""

    adopt: float  # place of the attempt that is the best so far; FAILED: what was, stays
    stop: float  # 1.0: the search is over
    low: float
    high: float
    reached: float  # 1.0: high is the bottleneck of a partition that fits
    max_rounds: float
    start_bottleneck: float


def message_capacity(num_layers: int) -> int:
    """The most floats that a message between two stages of a model of ``num_layers`` holds.

    It holds for groups of them too: of two layers or more, what a group says is no longer than what they would.
    """
    window = 2 + num_layers * RECORD_WIDTH
    return len(_Verdict._fields) + window + (TARGETS + 1) * len(dataclasses.fields(Attempt))


class DiffusionNode:
    """One stage. Round after round: deliver what :meth:`messages` gives, then :meth:`receive`, until :attr:`done`.

    Args:
        stage, num_stages: its place.
        start: number of its first layer.
        costs: of its own layers (or groups of layers, which are counted then), at least one, on a stage of speed 1.
        memory: bytes of its own layers and its own limit; None where memory does not count.
        speed: its own, relative to the others'.

    Every message is a flat list of floats or None: nothing travels. What a stage is about to receive is known
    from the round alone (:attr:`expects`), its length is not: at most ``message_capacity(num_layers)``.

    Attributes:
        rounds: received so far; the same on every stage.
        layers: the layers that it owns now, with what travels with them.
        start_bottleneck: of the whole pipeline before the first round, known to all once done.
        end_bottleneck: of the whole pipeline when done (an upper bound if memory counts or speeds differ); ``inf``, as
            long as no partition that fits was found.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        start: int,
        costs: Sequence[float],
        *,
        memory: StageMemory | None = None,
        speed: float = 1.0,
    ) -> None:
        self.stage = stage
        self.num_stages = num_stages
        self.layers = Stretch(start, _records(costs, memory))
        self.rounds = 0
        self._room = Room.of(memory, stage, num_stages, speed)
        self.start_bottleneck = self.layers.load(self._room, *self.bounds)
        self.end_bottleneck = math.inf
        self._micro_batches = 1 if memory is None else memory.micro_batches
        self._group_sizes = _inner_sizes(memory)
        self._fits = self.layers.fits(self._room, *self.bounds)
        self._hops = num_stages - 1
        self._survey = self._own_survey()
        self._verdict: _Verdict | None = None
        self._known = self.layers
        self._from_left: list[Attempt] = []
        self._from_right: list[Attempt] = []
        self._to_right: list[Attempt] = []
        self._to_left: list[Attempt] = []
        self._best = self.layers
        self._even_out_from: int | None = None
        self._quiet = 0
        self._done = False
        if num_stages == 1:
            self._done = True
            self.end_bottleneck = self.start_bottleneck if self._fits else math.inf

    @property
    def bounds(self) -> tuple[int, int]:
        """Layers ``[start, stop)`` that it owns now."""
        return self.layers.start, self.layers.stop

    @property
    def done(self) -> bool:
        """True on every stage after the same round."""
        return self._done

    @property
    def fits(self) -> bool:
        """Once done: whether a partition within every stage's limit was found (or was there from the start)."""
        return self.end_bottleneck < math.inf

    @property
    def expects(self) -> tuple[bool, bool]:
        """Whether a message comes from the (left, right) neighbour in this round."""
        return self._sends(self.stage - 1)[1], self._sends(self.stage + 1)[0]

    def messages(self) -> tuple[Message | None, Message | None]:
        """What to deliver in this round to the (left, right) neighbour; None: nothing."""
        to_left, to_right = self._sends(self.stage)
        if self._even_out_from is not None:
            told: Message = [float(self._quiet), self._room.limit_bytes, self._room.speed, *self.layers.encoded()]
            return told if to_left else None, told if to_right else None
        if to_right:
            return None, self._sweep_right()
        if to_left:
            return (list(self._survey) if self.rounds < self._hops else self._sweep_left()), None
        return None, None

    def receive(self, from_left: Message | None, from_right: Message | None) -> None:
        """End this round with what the neighbours sent."""
        if self._even_out_from is not None:
            self._even_out(from_left, from_right)
        elif from_left is not None:
            self._hear_right_sweep(from_left)
        elif from_right is not None and self.rounds < self._hops:
            self._survey = self._survey.joined(_Survey(*from_right))
        elif from_right is not None:
            self._hear_left_sweep(from_right)
        self.rounds += 1
        self._next_part()

    def _sends(self, stage: int) -> tuple[bool, bool]:
        """Whether ``stage`` sends to its (left, right) neighbour in this round: the same schedule everywhere."""
        if not 0 <= stage < self.num_stages:
            return False, False
        if self._even_out_from is not None:
            right = (stage - (self.rounds - self._even_out_from)) % 2 == 0
            return not right and stage > 0, right and stage < self.num_stages - 1
        if self.rounds < self._hops:
            return stage == self.num_stages - 1 - self.rounds, False
        back, hop = divmod((self.rounds - self._hops) % (2 * self._hops), self._hops)
        if back:
            return stage == self.num_stages - 1 - hop, False
        return False, stage == hop

    # Part 1: overload is passed on.

    def _own_survey(self) -> _Survey:
        costs = [record.cost for record in self.layers.records]
        smallest = min((cost for cost in costs if cost > 0), default=math.inf)
        speed = self._room.speed
        return _Survey(
            self.start_bottleneck, max(costs), math.fsum(costs), smallest, float(self._fits), speed, speed, speed
        )

    def _sweep_right(self) -> Message:
        assert self._verdict is not None
        handed = min((attempt.bound for attempt in self._to_right if attempt.bound != FAILED), default=self.layers.stop)
        window = self._known.part(handed, self.layers.stop)
        return [*self._verdict, *window.encoded(), *_encoded(self._to_right)]

    def _start_sweep(self) -> None:
        """Stage 0 only, before a sweep to the right."""
        self._verdict = self._judge()
        self._hear_verdict()
        targets = [] if self._verdict.stop else pick_targets(self._bracket())
        self._try(self.layers, [Attempt(target, 0) for target in targets])

    def _judge(self) -> _Verdict:
        """Stage 0 only: what the finished pair of sweeps, or the first sweep, says."""
        if self._verdict is None:
            survey, place = self._survey, FAILED
            longest, shortest = survey.total / survey.slowest, survey.smallest_cost / survey.fastest
            # Sums of what stages say are off by some roundings; no partition is below this.
            low = max(survey.largest_cost / survey.fastest, survey.total / survey.speed * (1 - 1e-9))
            high = survey.bottleneck if survey.fits else longest * (1 + 1e-9)
            bracket = Bracket(low, high, bool(survey.fits))
            max_rounds = lemma2_bound(self.num_stages, longest, shortest)
            start_bottleneck = survey.bottleneck
        else:
            place, bracket = choose(self._bracket(), self._to_left)
            max_rounds, start_bottleneck = int(self._verdict.max_rounds), self._verdict.start_bottleneck
        # After another try: two sweeps, the stop, and the rounds that it takes to see that all is quiet.
        last_chance = self.rounds + 3 * self._hops + self.num_stages + 2 > max_rounds
        stop = bracket.closed or last_chance
        return _Verdict(place, stop, bracket.low, bracket.high, bracket.reached, max_rounds, start_bottleneck)

    def _bracket(self) -> Bracket:
        assert self._verdict is not None
        return Bracket(self._verdict.low, self._verdict.high, bool(self._verdict.reached))

    def _hear_right_sweep(self, message: Message) -> None:
        head = len(_Verdict._fields)
        self._verdict = _Verdict(*message[:head])
        self._hear_verdict()
        window, rest = Stretch.decoded(message[head:], self._group_sizes)
        if window.records:
            assert window.stop == self.layers.start
        self._try(window.joined(self.layers) if window.records else self.layers, Attempt.decoded(rest))

    def _hear_verdict(self) -> None:
        assert self._verdict is not None
        place = int(self._verdict.adopt)
        if place != FAILED:
            start = self._to_left[place].bound
            stop = self._from_right[place].bound if self.stage < self._hops else self._known.stop
            self._best = self._known.part(start, stop)

    def _try(self, known: Stretch, attempts: list[Attempt]) -> None:
        """Keep what each target allows; the last stage, with nobody to its right, turns the sweep around."""
        self._known = known
        self._from_left = attempts
        if self.stage < self._hops:
            self._to_right = [keep_left(known, self._room, self.layers.stop, attempt) for attempt in attempts]
            return
        self._settle([Attempt(attempt.target, known.stop) for attempt in attempts])

    def _settle(self, attempts: list[Attempt]) -> None:
        self._from_right = attempts
        starts = [attempt.bound for attempt in self._from_left]
        self._to_left = [
            keep_right(self._known, self._room, start, attempt) for start, attempt in zip(starts, attempts)
        ]

    def _hear_left_sweep(self, message: Message) -> None:
        window, rest = Stretch.decoded(message, self._group_sizes)
        if window.records:
            self._known = self._known.joined(window)
        self._settle(Attempt.decoded(rest))

    def _sweep_left(self) -> Message:
        handed = max((attempt.bound for attempt in self._to_left), default=FAILED)
        return [*self._known.part(self.layers.start, handed).encoded(), *_encoded(self._to_left)]

    # Part 2: neighbours even out.

    def _next_part(self) -> None:
        """After a round: begin a pair of sweeps or the second part, or end."""
        sweep, hop = divmod(self.rounds - self._hops, self._hops)
        if self._even_out_from is not None:
            assert self._verdict is not None
            self._done = self._quiet > self.num_stages + 1 or self.rounds >= self._verdict.max_rounds
        elif self._verdict is not None and self._verdict.stop and hop == 0:
            self._take_on_best(self._verdict)
        elif self.stage == 0 and sweep >= 0 and sweep % 2 == 0 and hop == 0:
            self._start_sweep()

    def _take_on_best(self, verdict: _Verdict) -> None:
        self.layers = self._best
        self.start_bottleneck = verdict.start_bottleneck
        self.end_bottleneck = verdict.high if verdict.reached else math.inf
        self._even_out_from = self.rounds
        self._done = not verdict.reached

    def _even_out(self, from_left: Message | None, from_right: Message | None) -> None:
        """One round of pairs: with the neighbour that sent, if one did."""
        before, partner_quiet = self.bounds, self._quiet
        if from_left is not None:
            partner_quiet = int(from_left[0])
            left, _ = Stretch.decoded(from_left[3:], self._group_sizes)
            both, bound = self._meet(left, self.layers, self._room_of(self.stage - 1, *from_left[1:3]), self._room)
            self.layers = both.part(bound, both.stop)
        elif from_right is not None:
            partner_quiet = int(from_right[0])
            right, _ = Stretch.decoded(from_right[3:], self._group_sizes)
            both, bound = self._meet(self.layers, right, self._room, self._room_of(self.stage + 1, *from_right[1:3]))
            self.layers = both.part(both.start, bound)
        self._quiet = 0 if self.bounds != before else 1 + min(self._quiet, partner_quiet)

    @staticmethod
    def _meet(left: Stretch, right: Stretch, left_room: Room, right_room: Room) -> tuple[Stretch, int]:
        """Both stages' layers, and their new boundary; both come to the same."""
        both = left.joined(right)

        def fits(left_layers: int) -> bool:
            bound = both.start + left_layers
            return both.fits(left_room, both.start, bound) and both.fits(right_room, bound, both.stop)

        left_costs, right_costs = ([record.cost for record in stretch.records] for stretch in (left, right))
        speeds = left_room.speed, right_room.speed
        return both, both.start + diffusion_step(left_costs, right_costs, fits, speeds=speeds)

    def _room_of(self, partner: int, limit_bytes: float, speed: float) -> Room:
        in_flight = min(self.num_stages - partner, self._micro_batches)
        return Room(limit_bytes, in_flight, self._room.checkpoint_interval, speed)


def _encoded(attempts: Sequence[Attempt]) -> Message:
    return [value for attempt in attempts for value in attempt.encoded()]


def _records(costs: Sequence[float], memory: StageMemory | None) -> list[LayerRecord]:
    if memory is None:
        return [LayerRecord(float(cost)) for cost in costs]
    every = zip(costs, memory.static_bytes, memory.activation_bytes, memory.input_bytes)
    records = [LayerRecord(float(cost), float(a), float(b), float(c)) for cost, a, b, c in every]
    if not _inner_sizes(memory):
        return records
    return [
        record._replace(inner=tuple(float(value) for layer in group for value in layer)) if len(group) > 1 else record
        for record, group in zip(records, memory.inner_bytes)
    ]


def _inner_sizes(memory: StageMemory | None) -> Sequence[int]:
    """Of each group of the model, where what its layers hold by themselves counts: segments begin within groups."""
    return memory.group_sizes if memory is not None and memory.checkpoint_interval else ()
