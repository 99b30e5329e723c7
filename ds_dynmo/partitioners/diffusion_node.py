"""One stage of the diffusion balancer. It exchanges messages with its two neighbours only.

Every stage runs a :class:`DiffusionNode`. In a round each message travels one hop. There are three phases, each a
generator below:

1. *Survey*: one sweep from the last stage to the first collects the largest and the summed load.
2. *Search*: stages pass overload on (module ``overload``). Stage 0 starts pairs of sweeps, to the right and back to the
   left. Each pair tries several targets for the bottleneck, and the next sweep to the right carries stage 0's verdict.
   When the verdict to stop has reached the last stage, every stage takes the layers that it kept for the best target.
3. *Even out* (:func:`diffusion_step`). The pairs (0, 1), (2, 3), ... and (1, 2), (3, 4), ... take turns. The two stages
   of a pair send each other their layers and compute the same new boundary, which minimises the heavier of the two
   loads. Each such step lowers the paper's potential if the two are equally fast, and never raises a bottleneck.

The stages agree on the end without a coordinator. A stage's quiet counter is 0 after a round in which the stage
changed. Else it is one more than the smaller of the counters of the stage and its partner. The pairs of two rounds
cover every boundary, so after two rounds without a change nothing changes any more. A change is known to all stages
within ``num_stages - 2`` rounds. So no counter exceeds ``num_stages + 1`` early, and all exceed it in the same round.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from ds_dynmo.partitioners.diffusion_messages import (
    LeftSweep,
    Message,
    Offer,
    PipelineSurvey,
    RightSweep,
    SearchVerdict,
)
from ds_dynmo.partitioners.diffusion_step import diffusion_step, lemma2_bound
from ds_dynmo.partitioners.memory import StageMemory
from ds_dynmo.partitioners.overload import FAILED, Attempt, Bracket, choose, keep_left, keep_right
from ds_dynmo.partitioners.stretch import Room, Stretch

__all__ = ["DiffusionNode"]


class _Turn(NamedTuple):
    """The messages of a stage in one round; it receives from at most one neighbour. Without any, it is idle."""

    to_left: Message | None = None
    to_right: Message | None = None
    from_left: bool = False
    from_right: bool = False


Result = TypeVar("Result")
Turns = Generator[_Turn, Message | None, Result]  # yields a turn per round, and is sent the message of that round


class DiffusionNode:
    """One stage. In each round, deliver :meth:`messages` and call :meth:`receive`, until it is :attr:`done`.

    Args:
        stage, num_stages: the position of the stage.
        start: number of the stage's first layer.
        costs: of the stage's layers (or groups of layers), at least one, on a stage of speed 1.
        memory: bytes of the stage's layers and limit of the stage; None: no limit.
        speed: of the stage, relative to the others.

    The round determines from whom a stage receives (:attr:`expects`).

    Attributes:
        rounds: number of completed rounds; the same on every stage.
        layers: the stage's layers now, with their costs and bytes.
        start_bottleneck: of the whole pipeline before the first round; known on all stages once done.
        end_bottleneck: of the whole pipeline when done (an upper bound with memory limits or different speeds);
            ``inf`` until a partition that fits is found.
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
        self.layers = Stretch.of(start, costs, memory)
        self.rounds = 0
        self._room = Room.of(memory, speed)
        self.start_bottleneck = self.layers.load(self._room, *self.extent)
        self.end_bottleneck = math.inf
        self._last = num_stages - 1
        self._fits_now = self.layers.fits(self._room, *self.extent)
        self._phases = self._run()
        self._turn: _Turn | None = next(self._phases, None)

    @property
    def extent(self) -> tuple[int, int]:
        """The stage's layers ``[start, stop)`` now."""
        return self.layers.start, self.layers.stop

    @property
    def done(self) -> bool:
        """Whether the run has ended: on every stage after the same round."""
        return self._turn is None

    @property
    def fits(self) -> bool:
        """Whether the partition is within every stage's limit; valid once done."""
        return self.end_bottleneck < math.inf

    @property
    def expects(self) -> tuple[bool, bool]:
        """Whether a message comes from the (left, right) neighbour in this round."""
        turn = self._turn or _Turn()
        return turn.from_left, turn.from_right

    def messages(self) -> tuple[Message | None, Message | None]:
        """Return the messages of this round to the (left, right) neighbour; None: no message."""
        turn = self._turn or _Turn()
        return turn.to_left, turn.to_right

    def receive(self, from_left: Message | None, from_right: Message | None) -> None:
        """End this round with the messages of the neighbours."""
        self.rounds += 1
        try:
            self._turn = self._phases.send(from_left or from_right)
        except StopIteration:
            self._turn = None

    def _run(self) -> Turns[None]:
        if self.num_stages == 1:
            self.end_bottleneck = self.start_bottleneck if self._fits_now else math.inf
            return
        survey = yield from self._survey()
        verdict, self.layers = yield from self._search(survey)
        self.start_bottleneck = verdict.start_bottleneck
        self.end_bottleneck = verdict.bottleneck
        if self.fits:
            yield from self._even_out(verdict.max_rounds)

    # A sweep passes each stage once; a stage is idle in the rounds in which the sweep is elsewhere.

    def _idle(self, rounds: int) -> Turns[None]:
        for _ in range(rounds):
            yield _Turn()

    def _hear_left(self) -> Turns[Message | None]:
        """Wait for a sweep to the right, which stage 0 starts."""
        yield from self._idle(self.stage - 1)
        return (yield _Turn(from_left=True))

    def _hear_right(self) -> Turns[Message | None]:
        """Wait for a sweep to the left, which the last stage starts."""
        yield from self._idle(self._last - self.stage - 1)
        return (yield _Turn(from_right=True))

    def _tell_right(self, message: Message) -> Turns[None]:
        """Pass a sweep to the right on, and wait until it has reached the last stage."""
        yield _Turn(to_right=message)
        yield from self._idle(self._last - self.stage - 1)

    def _tell_left(self, message: Message) -> Turns[None]:
        """Pass a sweep to the left on, and wait until it has reached stage 0."""
        yield _Turn(to_left=message)
        yield from self._idle(self.stage - 1)

    # Phase 1: one sweep to the left.

    def _survey(self) -> Turns[PipelineSurvey]:
        """Combine the surveys of this stage and those to its right; stage 0 gets that of the whole pipeline."""
        costs = self.layers.costs
        smallest = min((cost for cost in costs if cost > 0), default=math.inf)
        speed = self._room.speed
        survey = PipelineSurvey(
            self.start_bottleneck, max(costs), math.fsum(costs), smallest, self._fits_now, speed, speed, speed
        )
        if self.stage < self._last:
            others = yield from self._hear_right()
            assert isinstance(others, PipelineSurvey)
            survey = survey.joined(others)
        if self.stage > 0:
            yield from self._tell_left(survey)
        return survey

    # Phase 2: pairs of sweeps, right and back left.

    def _search(self, survey: PipelineSurvey) -> Turns[tuple[SearchVerdict, Stretch]]:
        """Try targets until the verdict is to stop; return it, and this stage's layers for the best target met.

        Args:
            survey: on stage 0, of the whole pipeline; unused elsewhere.
        """
        best = known = self.layers
        kept: list[tuple[int, int]] = []  # for each target of the last pair of sweeps
        if self.stage == 0:
            bracket, verdict = self._first_bracket(survey)
        while True:
            if self.stage == 0:
                window = Stretch(self.layers.start, [])
                attempts: Sequence[Attempt] = [Attempt(target, 0) for target in bracket.targets if not verdict.stop]
            else:
                coming = yield from self._hear_left()
                assert isinstance(coming, RightSweep)
                verdict, window, attempts = coming
            if verdict.adopt != FAILED:
                best = known.part(*kept[verdict.adopt])
            known = window.joined(self.layers)
            if self.stage < self._last:
                passed = [keep_left(known, self._room, self.layers.stop, attempt) for attempt in attempts]
                yield from self._tell_right(RightSweep.handing_on(verdict, known, self.layers.stop, passed))
            if verdict.stop:
                return verdict, best
            if self.stage < self._last:
                returning = yield from self._hear_right()
                assert isinstance(returning, LeftSweep)
                back, known = returning.attempts, known.joined(returning.window)
            else:  # the last stage: the sweep turns around
                back = [Attempt(attempt.target, known.stop) for attempt in attempts]
            settled = [keep_right(known, self._room, left.boundary, right) for left, right in zip(attempts, back)]
            kept = [(first.boundary, end.boundary) for first, end in zip(settled, back)]
            if self.stage > 0:
                yield from self._tell_left(LeftSweep.handing_on(known, self.layers.start, settled))
            else:
                place, bracket = choose(bracket, settled)
                bottleneck = verdict.bottleneck if place == FAILED else bracket.high
                verdict = verdict._replace(adopt=place, stop=bracket.closed, bottleneck=bottleneck)

    def _first_bracket(self, survey: PipelineSurvey) -> tuple[Bracket, SearchVerdict]:
        """Bound the least bottleneck from the survey, on stage 0."""
        total, gap = survey.total / survey.slowest, survey.smallest_cost / survey.fastest
        # No partition is below this, with an allowance for rounding errors of sums.
        low = max(survey.largest_cost / survey.fastest, survey.total / survey.speed * (1 - 1e-9))
        bottleneck = survey.bottleneck if survey.fits else math.inf
        high = min(bottleneck, math.nextafter(total * (1 + 1e-9), math.inf))
        bracket = Bracket(low, high)
        max_rounds = lemma2_bound(self.num_stages, total, gap)
        return bracket, SearchVerdict(FAILED, bracket.closed, bottleneck, survey.bottleneck, max_rounds)

    # Phase 3: neighbours even out.

    def _even_out(self, max_rounds: int) -> Turns[None]:
        """Settle the boundary with one neighbour per round, right and left in turn, until no stage changes."""
        first_round, quiet = self.rounds, 0
        while True:
            to_right = (self.stage - (self.rounds - first_round)) % 2 == 0
            partner = self.stage + (1 if to_right else -1)
            if 0 <= partner < self.num_stages:
                sent = Offer(quiet, self._room, self.layers)
                offer = yield _Turn(to_right=sent, from_right=True) if to_right else _Turn(to_left=sent, from_left=True)
                assert isinstance(offer, Offer)
                before, self.layers = self.extent, self._settled(partner, offer)
                quiet = 0 if self.extent != before else 1 + min(quiet, offer.quiet)
            else:
                yield _Turn()
                quiet += 1
            if quiet > self.num_stages + 1 or self.rounds >= max_rounds:
                return

    def _settled(self, partner: int, offer: Offer) -> Stretch:
        """Return this stage's layers after evening out with ``partner``, which computes the same boundary."""
        if partner > self.stage:
            both, boundary = _meet(self.layers, offer.layers, self._room, offer.room)
            return both.part(both.start, boundary)
        both, boundary = _meet(offer.layers, self.layers, offer.room, self._room)
        return both.part(boundary, both.stop)


def _meet(left: Stretch, right: Stretch, left_room: Room, right_room: Room) -> tuple[Stretch, int]:
    """Return the layers of two neighbours, and their new boundary."""
    both = left.joined(right)

    def fits(left_layers: int) -> bool:
        boundary = both.start + left_layers
        return both.fits(left_room, both.start, boundary) and both.fits(right_room, boundary, both.stop)

    speeds = left_room.speed, right_room.speed
    return both, both.start + diffusion_step(left.costs, right.costs, fits, speeds=speeds)
