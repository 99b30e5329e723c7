"""The timeline of any schedule under any costs, simulated by ``order``.

:mod:`ds_dynmo.schedules.fast_1f1b` simulates DeepSpeed's 1F1B of many pipelines at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules.costs import PassCosts
from ds_dynmo.schedules.order import run
from ds_dynmo.schedules.schedule import Schedule

__all__ = ["ScheduleTimeline", "idle_share", "replay"]


def idle_share(busy_seconds: float, seconds: float) -> float:
    """Compute the share of ``seconds`` in which nothing runs; 0.0 if ``seconds`` is 0."""
    return max(0.0, (seconds - busy_seconds) / seconds) if seconds else 0.0


@dataclass(frozen=True)
class ScheduleTimeline:
    """One iteration under a schedule, from time 0 until every stage is done.

    Attributes:
        schedule: the simulated schedule.
        start_seconds, end_seconds: per stage and action, in the shape of ``schedule.orders``.
    """

    schedule: Schedule
    start_seconds: tuple[tuple[float, ...], ...]
    end_seconds: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule, starts: Sequence[Sequence[float]], costs: PassCosts) -> ScheduleTimeline:
        """Build the timeline from the starts of actions, in the shape of ``schedule.orders``."""
        seconds = costs.by_kind
        ends = (
            tuple(start + seconds[kind][chunk] for start, (kind, chunk, _) in zip(stage_starts, order))
            for stage_starts, order in zip(starts, schedule.orders)
        )
        return cls(schedule, tuple(map(tuple, starts)), tuple(ends))

    @property
    def iteration_seconds(self) -> float:
        """The end of the last action."""
        return max(ends[-1] for ends in self.end_seconds)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Per stage, seconds spent in passes."""
        stages = zip(self.start_seconds, self.end_seconds)
        return tuple(math.fsum(end - start for start, end in zip(starts, ends)) for starts, ends in stages)

    @property
    def stage_bubble_ratios(self) -> tuple[float, ...]:
        """Per stage, the share of the iteration in which it runs no pass."""
        return tuple(idle_share(busy, self.iteration_seconds) for busy in self.busy_seconds)

    @property
    def bubble_ratio(self) -> float:
        """The share of stages x iteration in which no pass runs."""
        return idle_share(math.fsum(self.busy_seconds), len(self.busy_seconds) * self.iteration_seconds)


def replay(schedule: Schedule, costs: PassCosts) -> ScheduleTimeline:
    """Simulate ``schedule`` under ``costs``, which may differ from those it was built for.

    Each stage starts an action as soon as the one before has ended and its data has arrived. Sends never block, and
    receives are posted ahead.

    Raises:
        ScheduleError: the costs are of chunks on other stages.
    """
    if costs.owners != schedule.owners:
        raise ScheduleError(
            f"the schedule is for chunks on stages {list(schedule.owners)}, the costs for {list(costs.owners)}"
        )
    return ScheduleTimeline.of(schedule, run(schedule.orders, schedule.micro_batches, costs).starts, costs)
