"""The times of profiles and decisions: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from ds_dynmo.config import DynMoConfig

_LEAST_SPAN = 100  # least batches that a decision is expected to last without an interval
_SHAPE_SPAN = 100  # least batches between decisions at intervals that weigh other shapes, which takes longest


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

    measurement: bool
    request: Request | None
    urgent: bool


class Trigger:
    """Determines which batches are profiled, and after which a decision is due.

    Steps are DeepSpeed's ``global_steps``: batch ``n`` ends with ``global_steps == n``. A decision is due after every
    ``interval`` batches within [start_step, stop_step]. Only the ``profile.batches`` batches before it are profiled.
    At the start of a run, and after a move, a profile is measured and reported once.

    With ``"enabled": false`` nothing is profiled or decided, with one exception: if ``initial_partition`` is "profile",
    the first profile after the warm-up places the layers, once.
    """

    _SAVED = (
        "_batches_since_move",
        "_urgent",
        "_measurement_wanted",
        "_unchanged",
        "_span",
        "_placed",
        "_since_shapes",
    )

    def __init__(self, config: DynMoConfig) -> None:
        self._config = config
        self._batches_since_move = 0  # batches since the start, or since layers last moved
        self._pending = Request(Reason.INITIAL) if config.initial_partition == "profile" else None
        self._taken: Due | None = None  # its profile is on the way
        self._placed = False
        self._urgent = False
        self._measurement_wanted = True  # the first profile of a run, and the first after each move
        self._unchanged = 0  # batches since the start, or since the model last changed
        self._span = 0  # batches between the model's last two changes
        self._since_shapes = _SHAPE_SPAN  # batches since a decision weighed other shapes; the first one does

    @property
    def pending(self) -> Request | None:
        """The request of the pending decision; None: none is pending."""
        return self._pending

    @property
    def urgent(self) -> bool:
        """Whether the pending decision does not wait for a warm-up."""
        return self._urgent

    @property
    def warm(self) -> bool:
        """Whether the warm-up after the start or the last move is over."""
        return self._batches_since_move >= self._config.profile.warmup_batches

    @property
    def placed(self) -> bool:
        """Whether a profile at the start placed the layers for good."""
        return self._placed

    @property
    def batches_to_gain(self) -> int:
        """The number of batches that a decision is expected to last.

        It is ``interval``, or without an interval the batches between the model's last two changes, at least 100.
        """
        return self._config.interval or max(_LEAST_SPAN, self._span)

    def weighs_shapes(self, request: Request) -> bool:
        """Return whether the decision that was requested weighs other shapes than the present one, and note that."""
        if request.reason == Reason.INTERVAL and self._since_shapes < _SHAPE_SPAN:
            return False
        self._since_shapes = 0
        return True

    def model_changed(self, reason: str) -> None:
        """Request a decision, because the costs of layers have changed."""
        self._span, self._unchanged = self._unchanged, 0
        self.ask(Request(Reason.MODEL_CHANGED, reason))

    def ask(self, request: Request) -> None:
        """Profile the next batch, even in the warm-up, and decide after it; do neither if switched off."""
        if self._config.enabled:
            self._pending, self._urgent = request, True

    def profile_batch(self, step: int) -> bool:
        """Return whether to profile the batch that will end with ``step``."""
        if self._urgent:
            return True
        if not self.warm:
            return False
        if not self._config.enabled:
            return self._pending is not None
        return (
            self._measurement_wanted
            or self._pending is not None
            or self._due_within(step, self._config.profile.batches)
        )

    def batch_done(self, step: int) -> None:
        """Count the batch that ended with ``step``."""
        self._batches_since_move += 1
        self._unchanged += 1
        self._since_shapes += 1
        if self._config.enabled and self._pending is None and self._due(step):
            self._pending = Request(Reason.INTERVAL)

    def take(self, profiled_batches: int) -> bool:
        """Take what is due after so many profiled batches. Its profile is gathered, and :meth:`finish` follows.

        Returns:
            Whether anything is due.
        """
        due = Due(self._measurement_wanted, self._pending, self._urgent)
        if not (due.measurement or due.request) or profiled_batches < self._config.profile.batches:
            return False
        self._taken = due
        self._measurement_wanted, self._pending, self._urgent = False, None, False
        return True

    def finish(self) -> Due:
        """Return what was taken: its profile is there."""
        due, self._taken = self._taken, None
        assert due is not None, "take comes first"
        if due.request is not None:
            self._placed = self._places_once
        return due

    def give_back(self, *, decision: bool = True) -> None:
        """Make due again what was taken: its profile was dropped, or failed.

        Args:
            decision: whether the decision is due again, too; else it is dropped.
        """
        due, self._taken = self._taken, None
        if due is None:
            return
        self._measurement_wanted = self._measurement_wanted or due.measurement
        if decision:
            self._pending, self._urgent = self._pending or due.request, self._urgent or due.urgent
        elif due.request is not None:
            self._placed = self._places_once

    def still_due(self, request: Request | None) -> None:
        """Make a decision due again whose profile was there, and which was not made; None: there was none."""
        if request is not None:
            self._pending, self._placed = self._pending or request, False

    @property
    def _places_once(self) -> bool:
        return not self._config.enabled and self._config.initial_partition == "profile"

    def decided(self, moved: bool) -> None:
        """Update after a decision that nothing was taken for: those that are due are dropped."""
        self._placed = self._places_once
        self._pending, self._urgent = None, False
        if self._taken is not None:
            self._taken = self._taken._replace(request=None, urgent=False)
        if moved:
            self.moved()

    def moved(self, *, in_batch: bool = False) -> None:
        """Update after a move: start the warm-up again, and measure the batches after it.

        Args:
            in_batch: whether layers moved in the batch that :meth:`batch_done` counts next: it ran where they were.
        """
        self._batches_since_move, self._measurement_wanted = -1 if in_batch else 0, True

    def state_dict(self, decided: Request | None = None) -> dict[str, Any]:
        """Return plain values for a checkpoint.

        Args:
            decided: the request of a move that was decided and is not done, which is lost with this run; None: none is.
        """
        due = self._taken or Due(False, None, False)
        pending = self._pending or due.request or decided
        return {
            **{name: getattr(self, name) for name in self._SAVED},
            "_urgent": self._urgent or due.urgent,
            "_measurement_wanted": self._measurement_wanted or due.measurement,
            "_placed": self._placed and decided is None,
            "_pending": None if pending is None else [pending.reason.name, pending.text],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        If rebalancing is off, drop a pending decision of the saved run. If ``initial_partition`` is then "profile", a
        profile places the layers, unless one did so in the saved run with rebalancing off.
        """
        for name in self._SAVED:
            setattr(self, name, state[name])
        pending, self._taken = state["_pending"], None
        self._pending = None if pending is None else Request(Reason[pending[0]], pending[1])
        if not self._config.enabled:
            self._urgent = False
            places = self._config.initial_partition == "profile" and not self._placed
            self._pending = Request(Reason.INITIAL) if places else None

    def _due(self, step: int) -> bool:
        config = self._config
        if config.interval == 0 or step < max(config.start_step, 1):
            return False
        return (config.stop_step is None or step <= config.stop_step) and step % config.interval == 0

    def _due_within(self, step: int, batches: int) -> bool:
        return any(self._due(later) for later in range(step, step + batches))
