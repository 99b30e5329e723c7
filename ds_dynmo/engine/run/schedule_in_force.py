"""The schedule of the next batch: 1F1B, the order for equal costs, or that of the latest decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ds_dynmo.config.dynmo import ScheduleConfig
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import Action, Kind, PassCosts, Schedule, one_f_one_b, schedule_for_equal_costs

SPLIT_IN_PROFILES = 2  # backward passes per chunk that a profile splits if the schedule splits none


class NextSchedule(NamedTuple):
    """A schedule, and the costs under which it was searched; None: nothing was measured."""

    schedule: Schedule
    costs: PassCosts | None


class ScheduleInForce:
    """Chooses the schedule of each batch.

    Attributes:
        found: the schedule of the latest decision; None: there was no decision, or 1F1B of a chain is as short.
        over_bound: of ``found``, as in a :class:`FoundSchedule`; 0.0: there is none.
        running: the schedule of the latest batch; None: there was none.
        is_profiled: returns whether the batch that starts is measured. Then each chunk splits some backward passes.
        back_to_back: whether schedules assume that batches overlap between stages.

    Args:
        use_1f1b_until_decided: use 1F1B's order, not that for equal costs, until a decision, because memory is limited
            and the bytes of passes are not yet known.
        stages_synchronise_per_batch: whether every stage waits for the others at the end of a batch.
    """

    def __init__(
        self,
        config: ScheduleConfig | None = None,
        *,
        use_1f1b_until_decided: bool = False,
        stages_synchronise_per_batch: bool = True,
    ) -> None:
        self._config, self._use_1f1b_until_decided = config or ScheduleConfig(), use_1f1b_until_decided
        # With 1F1B's memory no stage can start earlier.
        self.back_to_back = self._config.memory > 1 and not stages_synchronise_per_batch
        self._before_decision: Schedule | None = None
        self._decided = False
        self.found: Schedule | None = None
        self._found_for: PassCosts | None = None
        self.over_bound = 0.0
        self.running: Schedule | None = None
        self.is_profiled: Callable[[], bool] = lambda: False

    @property
    def may_choose_schedule(self) -> bool:
        """Whether another schedule than 1F1B may be in force."""
        return self._config.kind != "1f1b"

    def decide(self, found: Schedule | None, costs: PassCosts | None = None, *, over_bound: float = 0.0) -> None:
        """Train by ``found``, which was searched under ``costs``, from the next batch on; None: by 1F1B.

        The costs of a schedule that stays in force stay too: they order its messages, and to order them again takes
        longer than any order saves.

        Args:
            over_bound: as in a :class:`FoundSchedule`.
        """
        if found is None or found != self.found:
            self.found, self._found_for = found, costs
        self.over_bound, self._decided = over_bound, True

    def forget(self) -> None:
        """Train as before the first decision until the next one: new ranks do not know the latest."""
        self.found, self._found_for, self.over_bound, self._decided = None, None, 0.0, False

    def next(self, placement: Placement, micro_batches: int) -> NextSchedule:
        """Return the schedule of the batch that starts."""
        schedule = self.schedule_for(placement, micro_batches)
        costs = self._found_for if schedule is not None and schedule is self.found else None
        if schedule is None:
            schedule = one_f_one_b(placement.num_stages, micro_batches)
        if self.is_profiled() and not self._is_always_1f1b(placement):
            schedule = with_some_split(schedule)
        self.running = schedule
        return NextSchedule(schedule, costs)

    def schedule_for(self, placement: Placement, micro_batches: int) -> Schedule | None:
        """Return the schedule of the next batch of a placement; None: 1F1B of a chain."""
        owners = placement.owners
        decided_1f1b = self._decided and self.found is None and placement.shape == "chain"
        if decided_1f1b or self._is_always_1f1b(placement):
            return None
        for known in (self.found, self._before_decision):
            if known is not None and (known.owners, known.micro_batches) == (owners, micro_batches):
                return known
        self._before_decision = self._for_equal_costs(placement, micro_batches)
        return self._before_decision

    def _is_always_1f1b(self, placement: Placement) -> bool:
        """Return whether no decision can find another schedule."""
        return placement.shape == "chain" and (self._config.kind == "1f1b" or placement.num_stages == 1)

    def _for_equal_costs(self, placement: Placement, micro_batches: int) -> Schedule:
        stages, shape = placement.num_stages, placement.shape
        if shape == "chain" and self._use_1f1b_until_decided:
            return one_f_one_b(stages, micro_batches)
        return schedule_for_equal_costs(
            stages, micro_batches, self._config.memory, shape=shape, back_to_back=self.back_to_back
        )


def with_some_split(schedule: Schedule, count: int = SPLIT_IN_PROFILES) -> Schedule:
    """Split the last ``count`` backward passes of every chunk without splits; the parts follow each other directly.

    So a profile measures both parts even if the schedule does not use them.
    """
    first = schedule.micro_batches - count
    in_two = {action.chunk for order in schedule.orders for action in order if action.kind == Kind.INPUT_GRADIENT}
    orders = tuple(
        tuple(
            part
            for action in order
            for part in (_parts(action) if action.chunk not in in_two and action.micro_batch >= first else (action,))
        )
        for order in schedule.orders
    )
    return schedule if orders == schedule.orders else replace(schedule, orders=orders)


def _parts(action: Action) -> tuple[Action, ...]:
    if action.kind != Kind.BACKWARD:
        return (action,)
    return action._replace(kind=Kind.INPUT_GRADIENT), action._replace(kind=Kind.WEIGHT_GRADIENT)
