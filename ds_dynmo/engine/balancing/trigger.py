"""When to profile and when to decide: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ds_dynmo.config import DynMoConfig

_LEAST_SPAN = 100  # batches that a change is taken to last, where decisions come from changes alone


class Reason(Enum):
    """Why a decision is asked for; the values are what reports say."""

    INITIAL = "initial"  # the first partition of a run
    INTERVAL = "interval"
    MODEL_CHANGED = "model changed"  # by the model, which says why
    BY_HAND = "by hand"  # the user asks to decide
    EXPLICIT = "explicit"  # the user says where to go
    CHECKPOINT = "checkpoint"  # layers go where they were saved

    @property
    def is_automatic(self) -> bool:
        """Is a move weighed against its cost? What a user asks for, or a run begins with, only has to be better."""
        return self in (Reason.INTERVAL, Reason.MODEL_CHANGED)


@dataclass(frozen=True)
class Request:
    """What asks for a decision.

    Attributes:
        text: what reports say of it, where that is not the reason's name.
    """

    reason: Reason
    text: str = ""

    def __str__(self) -> str:
        return self.text or self.reason.value


class Trigger:
    """Which batches are profiled, and after which a decision is due.

    Steps are DeepSpeed's ``global_steps``: batch ``n`` is the one that ends with ``global_steps == n``. A decision
    is due after every ``interval`` batches within [start_step, stop_step]; the batches before it are profiled, so
    that nothing is measured that is not used. After a move the outcome is measured once.

    Switched off, nothing is profiled or decided, with one exception: where ``initial_partition`` is "profile", the
    first profile after the warm-up places the layers, once.
    """

    _SAVED = ("_settled", "_urgent", "_outcome_wanted", "_unchanged", "_span")  # in a checkpoint

    def __init__(self, config: DynMoConfig) -> None:
        self._config = config
        self._settled = 0  # batches since the start or since layers last moved
        self._pending = Request(Reason.INITIAL) if config.initial_partition == "profile" else None
        self._placed = False
        self._urgent = False
        self._outcome_wanted = True  # the first profile of a run, and the first after each move
        self._unchanged = 0  # batches since the start or since the model last changed
        self._span = 0  # how many there were when it last changed

    @property
    def pending(self) -> Request | None:
        """What asked for the decision that is pending, None if none is."""
        return self._pending

    @property
    def warm(self) -> bool:
        """Is the warm-up after the start or the last move over?"""
        return self._settled >= self._config.profile.warmup_batches

    @property
    def placed(self) -> bool:
        """Are layers where a profile at the start put them, never to move again?"""
        return self._placed

    @property
    def batches_to_gain(self) -> int:
        """For how many batches what is decided now is expected to last.

        Until the next interval; without intervals as long as the model's work stayed as it was before its last change,
        at least 100.
        """
        return self._config.interval or max(_LEAST_SPAN, self._span)

    def model_changed(self, reason: str) -> None:
        """Layers cost something else from here on."""
        self._span, self._unchanged = self._unchanged, 0
        self.ask(Request(Reason.MODEL_CHANGED, reason))

    def ask(self, request: Request) -> None:
        """The next batch is profiled, whatever the warm-up, and a decision follows; switched off, neither."""
        if self._config.enabled:
            self._pending, self._urgent = request, True

    def profile_batch(self, step: int) -> bool:
        """Is the batch that will end with ``step`` to be profiled?"""
        if self._urgent:
            return True
        if not self.warm:
            return False
        if not self._config.enabled:
            return self._pending is not None
        return self._outcome_wanted or self._pending is not None or self._due_within(step, self._config.profile.batches)

    def batch_done(self, step: int) -> None:
        """A batch ended with ``step``."""
        self._settled += 1
        self._unchanged += 1
        if self._config.enabled and self._pending is None and self._due(step):
            self._pending = Request(Reason.INTERVAL)

    def decision_due(self, profiled_batches: int) -> bool:
        """Is a decision pending, with a profile long enough to take it?"""
        return self._pending is not None and profiled_batches >= self._config.profile.batches

    def outcome_due(self, profiled_batches: int) -> bool:
        """Is the outcome of the last move still to be recorded, and measured well enough?"""
        return self._outcome_wanted and profiled_batches >= self._config.profile.batches

    def outcome_recorded(self) -> None:
        self._outcome_wanted = False

    def decided(self, moved: bool) -> None:
        """A decision was taken."""
        self._placed = not self._config.enabled and self._config.initial_partition == "profile"
        self._pending, self._urgent = None, False
        if moved:
            self.moved()

    def moved(self) -> None:
        """Layers are elsewhere, by a decision or because the run begins there."""
        self._settled, self._outcome_wanted = 0, True

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        pending = self._pending
        text = str(pending) if pending is not None else None
        state = {**{name: getattr(self, name) for name in self._SAVED}, "_placed": self._placed, "_reason": text}
        if pending is not None and _request_saved(state) != pending:  # a model may say "interval"
            state["asked_as"] = pending.reason.name
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where :meth:`state_dict` was taken.

        Switched off, a decision that the saved run was about to take is dropped. Where ``initial_partition`` is
        "profile", a profile places the layers once more, unless one did in the saved run, switched off too.
        """
        for name in self._SAVED:
            setattr(self, name, state[name])
        self._placed = state.get("_placed", False)  # checkpoints lacked it once
        self._pending = _request_saved(state)
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


def _request_saved(state: dict[str, Any]) -> Request | None:
    """Of a checkpoint, which says in words what asked for a decision, and the reason's name where words mislead."""
    text = state["_reason"]
    if text is None:
        return None
    if "asked_as" in state:
        return Request(Reason[state["asked_as"]], text)
    return next((Request(reason) for reason in Reason if reason.value == text), Request(Reason.MODEL_CHANGED, text))
