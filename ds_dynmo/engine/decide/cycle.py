"""Where a run is between decisions. Pure, and the same on every rank: every rank sees the same events.

    state      what is going on                                         ends with
    Idle       nothing                                                  ProfilePosted, Chosen
    Measuring  a profile is on its way to rank 0, which may decide      ProfileRead, ProfileUnread, ProfileDropped
    Decided    layers move in the next batch                            Begun, Forgotten
    Moving     layers move while a batch trains                         Ended, Interrupted

:func:`after` is the table of all transitions. Beside the state a cycle counts batches, and knows what is due: which
batches are profiled, and when a decision follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.decide.decision import Decision
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan, Profile

_LEAST_SPAN = 100  # least batches that a decision is expected to last without an interval
_SHAPE_SPAN = 100  # least batches between decisions at intervals that weigh other shapes, which takes longest


# -- what is asked for, and decided --------------------------------------------------------------------


class Reason(Enum):
    """Why a decision is requested. The values appear in reports."""

    INITIAL = "initial"  # the first partition of a run
    INTERVAL = "interval"
    MODEL_CHANGED = "model changed"  # reports have the model's reason
    BY_HAND = "by hand"  # the user requests a decision
    EXPLICIT = "explicit"  # the user gives a partition
    CHECKPOINT = "checkpoint"  # the partition of a checkpoint

    @property
    def is_automatic(self) -> bool:
        """Whether a move has to repay its cost; decisions by hand, and the first of a run, need only be better."""
        return self in (Reason.INTERVAL, Reason.MODEL_CHANGED)

    @property
    def ends_with_a_change(self) -> bool:
        """Whether a move is dropped when the model changes, as it was decided from the costs of before.

        One that followed a change is not: a model that changes in every batch would never move. A given one neither.
        """
        return self in (Reason.INITIAL, Reason.INTERVAL, Reason.BY_HAND)


@dataclass(frozen=True)
class Request:
    """A request for a decision.

    Attributes:
        text: the reason in reports; "" for the value of ``reason``.
    """

    reason: Reason
    text: str = ""

    def __str__(self) -> str:
        return self.text or self.reason.value


class Due(NamedTuple):
    """What a profile is gathered for.

    Attributes:
        measurement: whether it is to be reported, as the first of a run or after a move.
        request: of a decision; None: none is due.
        urgent: whether the decision does not wait for a warm-up.
    """

    measurement: bool = False
    request: Request | None = None
    urgent: bool = False

    def without_decision(self) -> Due:
        """Return the part that is no decision."""
        return Due(self.measurement)

    def joined(self, other: Due) -> Due:
        """Return what is due by either; a decision of this one comes first."""
        return Due(self.measurement or other.measurement, self.request or other.request, self.urgent or other.urgent)


@dataclass(frozen=True)
class DecidedMove:
    """A move that is to be carried out.

    Attributes:
        target: the placement to go to.
        decision: that chose it; None: the user did, and there was no profile.
        profile: from which it was decided, for the memory that stages need; None: the user chose the target.
        seconds: of gathering the profile, and of the decision.
        clears_pending_decision: whether to drop a pending decision.
        has_begun: whether layers went a part of the way in earlier batches.
    """

    target: Placement
    request: Request
    decision: Decision | None
    profile: Profile | None
    seconds: tuple[float, float]
    clears_pending_decision: bool = True
    has_begun: bool = False


# -- states --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Idle:
    """Nothing is going on."""


@dataclass(frozen=True)
class Measuring:
    """A profile is on its way, for what was ``due``."""

    due: Due


@dataclass(frozen=True)
class Decided:
    """Layers move in the next batch."""

    move: DecidedMove


@dataclass(frozen=True)
class Moving:
    """Layers move while a batch trains: ``plan``, which is ``move`` or a part of it; ``rest`` is left to move after."""

    move: DecidedMove
    plan: MigrationPlan
    rest: DecidedMove | None


State = Idle | Measuring | Decided | Moving


# -- events --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchEnded:
    """A batch has trained; ``step`` is then DeepSpeed's ``global_steps``."""

    step: int


@dataclass(frozen=True)
class ProfilePosted:
    """The measurements for what is due were posted."""


@dataclass(frozen=True)
class ProfileRead:
    """The profile that was on its way is there; its decision, if one was due, follows."""


@dataclass(frozen=True)
class ProfileUnread:
    """The profile that was on its way could not be read: its decision is dropped."""


@dataclass(frozen=True)
class ProfileDropped:
    """The profile on its way is of no use any more: what it was for is due again."""


@dataclass(frozen=True)
class ModelChanged:
    """The costs of layers have changed, because of ``reason``."""

    reason: str


@dataclass(frozen=True)
class Asked:
    """A profile of the next batch is asked for, and a decision after it."""

    request: Request


@dataclass(frozen=True)
class NotMade:
    """A decision whose profile is there was not made: it is due again; None: none was due."""

    request: Request | None


@dataclass(frozen=True)
class Weighed:
    """A decision weighs other shapes of placements."""


@dataclass(frozen=True)
class Chosen:
    """A move was chosen, for the next batch."""

    move: DecidedMove


@dataclass(frozen=True)
class Forgotten:
    """What a move was decided from has changed before it began."""


@dataclass(frozen=True)
class Begun:
    """Layers have begun to move, right before a batch."""

    moving: Moving


@dataclass(frozen=True)
class Ended:
    """The move of a batch has ended with it; ``moved``: not if it failed harmlessly."""

    moved: bool


@dataclass(frozen=True)
class Interrupted:
    """An exception has ended a batch."""


@dataclass(frozen=True)
class Settled:
    """A decision was carried out between two batches; ``moved``: layers have changed places.

    ``clears_pending_decision``: as in a :class:`DecidedMove`.
    """

    moved: bool
    clears_pending_decision: bool = True


Event = (
    BatchEnded
    | ProfilePosted
    | ProfileRead
    | ProfileUnread
    | ProfileDropped
    | ModelChanged
    | Asked
    | NotMade
    | Weighed
    | Chosen
    | Forgotten
    | Begun
    | Ended
    | Interrupted
    | Settled
)


# -- the cycle -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cycle:
    """Where a run is, what is due, and the batches that count for it.

    Steps are DeepSpeed's ``global_steps``: batch ``n`` ends with ``global_steps == n``. A decision is due after every
    ``interval`` batches within [start_step, stop_step]. Only the ``profile.batches`` batches before it are profiled. At
    the start of a run, and after a move, a profile is measured and reported once.

    With ``"enabled": false`` nothing is profiled or decided, with one exception: if ``initial_partition`` is "profile",
    the first profile after the warm-up places the layers, once.

    Attributes:
        config: the "dynmo" section.
        state: what is going on.
        due: what the next profile is for.
        since_move: batches since the start, or since layers last moved.
        unchanged: batches since the start, or since the model last changed.
        span: batches between the model's last two changes.
        since_shapes: batches since a decision weighed other shapes; the first one does.
        placed: whether a profile at the start placed the layers for good.
    """

    config: DynMoConfig
    state: State = field(default_factory=Idle)
    due: Due = field(default_factory=lambda: Due(measurement=True))
    since_move: int = 0
    unchanged: int = 0
    span: int = 0
    since_shapes: int = _SHAPE_SPAN
    placed: bool = False

    @classmethod
    def begin(cls, config: DynMoConfig) -> Cycle:
        """Return the cycle of a new run."""
        first = Request(Reason.INITIAL) if config.initial_partition == "profile" else None
        return cls(config, due=Due(True, first))

    @property
    def warm(self) -> bool:
        """Whether the warm-up after the start or the last move is over."""
        return self.since_move >= self.config.profile.warmup_batches

    @property
    def batches_to_gain(self) -> int:
        """The number of batches that a decision is expected to last.

        It is ``interval``, or without an interval the batches between the model's last two changes, at least 100.
        """
        return self.config.interval or max(_LEAST_SPAN, self.span)

    @property
    def decided(self) -> DecidedMove | None:
        """The move that begins with the next batch; None: there is none."""
        return self.state.move if isinstance(self.state, Decided) else None

    def profiles_batch(self, step: int) -> bool:
        """Return whether to profile the batch that will end with ``step``."""
        if self.due.urgent:
            return True
        if not self.warm:
            return False
        if not self.config.enabled:
            return self.due.request is not None
        steps = range(step, step + self.config.profile.batches)
        return self.due.measurement or self.due.request is not None or any(map(self.is_interval, steps))

    def is_profile_due(self, profiled_batches: int) -> bool:
        """Return whether what is due is to be measured now, after so many profiled batches."""
        wanted = self.due.measurement or self.due.request is not None
        return wanted and profiled_batches >= self.config.profile.batches

    def weighs_shapes(self, request: Request) -> bool:
        """Return whether the decision that was requested weighs other shapes than the present one."""
        return request.reason != Reason.INTERVAL or self.since_shapes >= _SHAPE_SPAN

    def is_interval(self, step: int) -> bool:
        """Return whether the interval makes a decision due after ``step``."""
        config = self.config
        if config.interval == 0 or step < max(config.start_step, 1):
            return False
        return (config.stop_step is None or step <= config.stop_step) and step % config.interval == 0

    @property
    def places_once(self) -> bool:
        """Whether one profile places the layers for good."""
        return not self.config.enabled and self.config.initial_partition == "profile"

    # -- checkpoints ------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Return plain values for a checkpoint: a decision that is under way is due again in a resumed run."""
        due, move = self.due, self.decided
        if isinstance(self.state, Measuring):
            due = due.joined(self.state.due)
        reason = move.request.reason if move is not None else None
        is_decided_again = reason is not None and (reason.is_automatic or reason is Reason.INITIAL)
        if is_decided_again and move is not None:
            due = due.joined(Due(request=move.request))
        return {
            "since_move": self.since_move,
            "unchanged": self.unchanged,
            "span": self.span,
            "since_shapes": self.since_shapes,
            "placed": self.placed and not is_decided_again,
            "measurement": due.measurement,
            "request": None if due.request is None else [due.request.reason.name, due.request.text],
            "urgent": due.urgent,
        }

    def resumed(self, saved: dict[str, Any]) -> Cycle:
        """Return the cycle of a run that goes on from :meth:`saved`.

        If rebalancing is off, drop a pending decision of the saved run. If ``initial_partition`` is then "profile", a
        profile places the layers, unless one did so in the saved run with rebalancing off.
        """
        counts = {name: saved[name] for name in ("since_move", "unchanged", "span", "since_shapes", "placed")}
        request = None if saved["request"] is None else Request(Reason[saved["request"][0]], saved["request"][1])
        due = Due(saved["measurement"], request, saved["urgent"])
        if not self.config.enabled:
            places = self.places_once and not saved["placed"]
            due = Due(due.measurement, Request(Reason.INITIAL) if places else None)
        return replace(self, state=Idle(), due=due, **counts)


def after(cycle: Cycle, event: Event) -> Cycle:
    """Return the cycle after an event. An event that cannot happen in a state is a fault of ours."""
    state, due, config = cycle.state, cycle.due, cycle.config
    match state, event:
        # a batch
        case _, BatchEnded(step):
            if config.enabled and due.request is None and cycle.is_interval(step):
                due = due._replace(request=Request(Reason.INTERVAL))
            return replace(
                cycle,
                due=due,
                since_move=cycle.since_move + 1,
                unchanged=cycle.unchanged + 1,
                since_shapes=cycle.since_shapes + 1,
            )
        case Moving(), Interrupted():
            return replace(cycle, state=Idle())
        case _, Interrupted():
            return cycle
        # a profile
        case Idle(), ProfilePosted():
            return replace(cycle, state=Measuring(due), due=Due())
        case Measuring(taken), ProfileRead():
            placed = cycle.places_once if taken.request is not None else cycle.placed
            return replace(cycle, state=Idle(), placed=placed)
        case Measuring(taken), ProfileUnread():
            placed = cycle.places_once if taken.request is not None else cycle.placed
            return replace(cycle, state=Idle(), due=due.joined(taken.without_decision()), placed=placed)
        case Measuring(taken), ProfileDropped():
            return replace(cycle, state=Idle(), due=due.joined(taken))
        case _, ProfileDropped():
            return cycle
        # what is due
        case Decided(move), ModelChanged() if config.enabled and move.request.reason.ends_with_a_change:
            return after(after(cycle, Forgotten()), event)
        case Moving(_, _, DecidedMove() as rest), ModelChanged() if (
            config.enabled and rest.request.reason.ends_with_a_change
        ):
            return after(replace(cycle, state=replace(state, rest=None)), event)
        case _, ModelChanged(reason):
            changed = replace(after(cycle, ProfileDropped()), span=cycle.unchanged, unchanged=0)
            return after(changed, Asked(Request(Reason.MODEL_CHANGED, reason)))
        case _, Asked(request):
            return replace(cycle, due=Due(due.measurement, request, True)) if config.enabled else cycle
        case _, NotMade(request):
            return cycle if request is None else replace(cycle, due=due.joined(Due(request=request)), placed=False)
        case _, Weighed():
            return replace(cycle, since_shapes=0)
        # a move
        case Idle() | Decided(), Chosen(move):
            if move.clears_pending_decision:
                cycle = after(cycle, Settled(moved=False))
            return replace(cycle, state=Decided(move))
        case Decided(), Forgotten():
            return replace(cycle, state=Idle())
        case _, Forgotten():
            return cycle
        case Decided(), Begun(moving):
            return replace(cycle, state=moving)
        case Moving(_, _, rest), Ended(moved):
            if not moved:
                return replace(cycle, state=Idle())
            # The batch that ends now ran where layers were: it does not count as one after the move.
            after_it = Idle() if rest is None else Decided(rest)
            return replace(cycle, state=after_it, due=due._replace(measurement=True), since_move=-1)
        case _, Settled(moved, clears):
            if clears:
                cycle = replace(cycle, due=due.without_decision(), placed=cycle.places_once)
                if isinstance(state, Measuring):
                    cycle = replace(cycle, state=Measuring(state.due.without_decision()))
            if moved:
                cycle = replace(cycle, due=cycle.due._replace(measurement=True), since_move=0)
            return cycle
    raise AssertionError(f"{type(event).__name__} while {type(state).__name__}")
