"""A move while a batch trains: it begins before the batch, and ends before the batch's optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from ds_dynmo.engine.move.migrator import Migrator, MoveResult
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import MigrationError
from ds_dynmo.partitioners import between
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan

FIRST_BYTES = 256 << 20  # moved while the first batch trains: a quarter of a second at 1 GB/s


@dataclass(frozen=True)
class MoveOutcome:
    """How a move ended.

    Attributes:
        result: of the move; or the harmless failure, the same on every rank, after which nothing has moved.
        seconds: from its beginning to its end, on this rank.
    """

    result: MoveResult | MigrationError
    seconds: float


class TransferBudget:
    """The bytes to move while one batch trains: what arrived in time in the batches before.

    Attributes:
        num_bytes: in a whole pipeline, by the sizes in the profile.
    """

    def __init__(self) -> None:
        self.num_bytes = FIRST_BYTES

    def record(self, num_bytes: int, share_in_time: float) -> None:
        """Update after a move, of which all ranks know the same.

        Args:
            num_bytes: that it moved.
            share_in_time: the least of all ranks.
        """
        if share_in_time < 1.0:
            self.num_bytes = max(1, int(num_bytes * share_in_time))
        else:
            self.num_bytes = max(self.num_bytes, 2 * num_bytes)

    def next_placement(
        self,
        here: Placement,
        target: Placement,
        *,
        allows: Callable[[Placement], bool],
        bytes_to: Callable[[Placement], int],
    ) -> Placement:
        """Find the placement nearest to ``target`` whose bytes are within the budget.

        Args:
            allows: returns whether layers may be placed so.
            bytes_to: returns the bytes to move to get there.

        Returns:
            If none is within the budget, the one nearest to ``here``: each boundary moves by a layer at most.
        """
        way: Iterable[Placement] = ()
        if target.shape == here.shape:
            way = (here.at(partition) for partition in between(here.boundaries, target.boundaries))
        steps = [target, *filter(allows, way)]
        return next((step for step in steps if bytes_to(step) <= self.num_bytes), steps[-1])


class BackgroundMove:
    """Moves layers while the next batch trains.

    The state of an optimizer is constant from one step to the next. So it travels from the beginning of a batch to the
    step at its end, at which the gradients follow. Between two batches nothing is under way.
    """

    def __init__(self, migrator: Migrator, stage: StageContext) -> None:
        self._migrator, self._stage = migrator, stage
        self._began = 0.0
        self._travelling = ExitStack()
        self._outcome: MoveOutcome | None = None
        self._is_interrupted = False

    def begin(self, plan: MigrationPlan) -> None:
        """Begin to move layers by ``plan``, right before a batch. Collective.

        Raises:
            MigrationError: see its message.
        """
        self._began, self._outcome = time.perf_counter(), None
        self._migrator.prepare(plan, overlapped=True)
        self._migrator.start()
        self._travelling.enter_context(self._stage.timeline.phase("transfer", f"layers from {plan.old} to {plan.new}"))
        self._stage.deferred_step.defer(poll=self._poll, before_step=self._commit, after_step=self._publish)

    def _poll(self) -> None:
        if self._migrator.poll():
            self._travelling.close()

    def _commit(self) -> None:
        """Change places, between the batch's gradients and the optimizer's step. Collective."""
        self._travelling.close()
        result: MoveResult | MigrationError
        try:
            result = self._migrator.commit()
        except MigrationError as error:
            if not error.harmless:
                raise
            result = error
        self._outcome = MoveOutcome(result, time.perf_counter() - self._began)

    def _publish(self) -> None:
        if self._outcome is not None and isinstance(self._outcome.result, MoveResult):
            self._stage.publish_move()

    def interrupt(self) -> None:
        """Update after an exception in the batch, which may be one of this rank alone. :meth:`settle` follows."""
        self._stage.deferred_step.cancel()
        self._travelling.close()
        self._is_interrupted = self._migrator.is_moving

    def settle(self) -> None:
        """Drop a move that an exception has interrupted: nothing has changed. Collective.

        Raises:
            MigrationError: fatal.
        """
        if self._is_interrupted:
            self._is_interrupted = False
            self._migrator.abandon()

    def take_outcome(self) -> MoveOutcome | None:
        """Return how the move of the last batch ended, once; None: there was none."""
        outcome, self._outcome = self._outcome, None
        return outcome
