"""A move while a batch trains: it begins before the batch, and ends before the batch's optimizer step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ds_dynmo.engine.move.migrator import Migrator
from ds_dynmo.engine.run.step_gate import StepGate
from ds_dynmo.errors import MigrationError
from ds_dynmo.plan import MigrationPlan


@dataclass(frozen=True)
class MoveOutcome:
    """How a move ended.

    Attributes:
        bytes_moved: in this rank's pipeline.
        waited_seconds: that training waited for it on this rank.
        seconds: from its begin to its end.
        failure: harmless, the same on every rank: nothing has moved; None: layers have moved.
    """

    bytes_moved: int
    waited_seconds: float
    seconds: float
    failure: MigrationError | None = None


class BackgroundMove:
    """Moves layers while the next batch trains.

    The state of an optimizer is constant from one step to the next. So it travels from the begin of a batch to the step
    at its end, at which the gradients follow. Between two batches nothing is under way.

    Args:
        gate: calls back during a batch, and before its optimizer's step.
    """

    def __init__(self, migrator: Migrator, gate: StepGate) -> None:
        self._migrator, self._gate = migrator, gate
        self._began = self._waited = 0.0
        self._outcome: MoveOutcome | None = None

    def begin(self, plan: MigrationPlan) -> None:
        """Begin to move layers by ``plan``, right before a batch. Collective.

        Raises:
            MigrationError: see its message.
        """
        self._began, self._waited = time.perf_counter(), 0.0
        self._migrator.prepare(plan, overlapped=True)
        self._migrator.start()
        self._gate.open_for(self._migrator.poll, self._commit)
        self._waited = time.perf_counter() - self._began

    def _commit(self) -> None:
        """Change places, between the batch's gradients and the optimizer's step. Collective."""
        began, bytes_moved, failure = time.perf_counter(), 0, None
        try:
            bytes_moved = self._migrator.commit()
        except MigrationError as error:
            if not error.harmless:
                raise
            failure = error
        ended = time.perf_counter()
        self._outcome = MoveOutcome(bytes_moved, self._waited + ended - began, ended - self._began, failure)

    def take_outcome(self) -> MoveOutcome | None:
        """Return how the move of the last batch ended, once; None: there was none."""
        outcome, self._outcome = self._outcome, None
        return outcome
