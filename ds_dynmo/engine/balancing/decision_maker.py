"""What decisions are calculated from: the profile, what the run has learnt, memory, and schedules to choose from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ds_dynmo.engine.balancing.background import searches_long
from ds_dynmo.engine.balancing.cost_model import CostModel
from ds_dynmo.engine.balancing.decentralized import decide_among_neighbours
from ds_dynmo.engine.balancing.memory import MemoryLimit
from ds_dynmo.engine.balancing.ordering import ScheduleChoice
from ds_dynmo.engine.balancing.policy import Decision, DecisionInput, accept_move, costs_and_speeds, decide
from ds_dynmo.engine.balancing.trigger import Reason
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.plan import Profile
from ds_dynmo.schedules import Schedule


class DecisionMaker:
    """Gathers what decisions are calculated from, the same on every rank."""

    def __init__(self, stage: StageContext, groups: LayerGroups, memory: MemoryLimit, cost_model: CostModel) -> None:
        self._stage, self._config = stage, stage.config
        self._groups, self._memory, self._cost_model = groups, memory, cost_model

    @property
    def chooses_schedule(self) -> bool:
        """Is there a schedule to choose beside a partition?"""
        return self._stage.schedule.is_ours and self._stage.placement.num_stages > 1

    def takes_long(self, profile: Profile) -> bool:
        """Is a decision to be calculated while a batch trains?"""
        shape = self._stage.placement.num_stages, profile.micro_batches
        back_to_back = self._stage.schedule.back_to_back
        return self.chooses_schedule and searches_long(self._config.balancer, *shape, back_to_back=back_to_back)

    def calculation(
        self, profile: Profile, limit_bytes: int | None, reason: Reason, batches_to_gain: int
    ) -> Callable[[], Decision]:
        """Make a decision's calculation from what is known now. Collective if ``dynmo.decentralized`` is set."""
        memory = self._memory.model(profile, limit_bytes)
        in_force = self.in_force(profile)
        given = self.decision_input(profile, limit_bytes, smoothed=reason.is_automatic, in_force=in_force)
        tradeoff = self._cost_model.move_tradeoff(batches_to_gain) if reason.is_automatic else None
        if not self._config.decentralized:
            return partial(decide, given, self._config, memory, tradeoff, self._groups)
        layers, stage_id = self._stage.layers, self._stage.engine.stage_id
        costs, speeds = costs_and_speeds(given, self._config)
        own_costs = [costs[index] for index in layers.indices]
        speed = speeds[stage_id] if speeds else 1.0
        proposed = decide_among_neighbours(
            own_costs, given.placement, memory, stage_id, self._stage.comm, speed=speed, groups=self._groups
        )
        return partial(accept_move, given, proposed, self._config, memory, tradeoff, self._groups)

    def decision_input(
        self, profile: Profile, limit_bytes: int | None, *, smoothed: bool, in_force: Schedule | None = None
    ) -> DecisionInput:
        """Make the input of a decision where layers are, with the schedules that it may choose from.

        Args:
            in_force: what predictions of the present iteration count with; None: DeepSpeed's 1F1B.
        """
        schedules = self.schedules(limit_bytes, in_force)
        return self._cost_model.decision_input(profile, self._stage.placement, smoothed=smoothed, schedules=schedules)

    def schedules(self, limit_bytes: int | None, in_force: Schedule | None = None) -> ScheduleChoice | None:
        """Say between which schedules a decision may choose; None: DeepSpeed's 1F1B is the only one."""
        schedule = self._stage.schedule
        if not schedule.is_ours:
            return None
        interval = self._memory.checkpoint_interval
        return ScheduleChoice(self._config.schedule, interval, limit_bytes, in_force, schedule.back_to_back)

    def in_force(self, profile: Profile) -> Schedule | None:
        """The schedule of the batches that ``profile`` is of; None: DeepSpeed's 1F1B."""
        schedule, num_stages = self._stage.schedule, self._stage.placement.num_stages
        return schedule.in_force(num_stages, profile.micro_batches) if self.chooses_schedule else None
