"""Rank 0 reads profiles and decides, in threads while training goes on; the other ranks hear what it found."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from ds_dynmo.engine.decide.aside import Aside
from ds_dynmo.engine.decide.cost_model import CostModel
from ds_dynmo.engine.decide.cycle import Request
from ds_dynmo.engine.decide.decision import Decision, decide, predict
from ds_dynmo.engine.decide.decision_input import DecisionInput
from ds_dynmo.engine.decide.memory import MemoryLimit
from ds_dynmo.engine.measure.profile_reduction import PostedProfile
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.validation import why_one_chunk
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.placement import Placement, Shape
from ds_dynmo.plan import Profile

DECIDING = "deciding where layers go"


@dataclass(frozen=True)
class Measured:
    """A profile that rank 0 has read, and its estimates with it."""

    profile: Profile
    cost_model: CostModel


class Decider:
    """Reads profiles, and decides from them. Every rank calls each method; rank 0 does the work.

    Attributes:
        groups: layers that are kept together.
        memory: the memory limit of a rank.
        cost_model: estimates of the costs of layers, stages and moves, on rank 0.
        profile: the latest profile, the same on every rank; None before the first.

    Args:
        batches_to_gain: returns how many batches a decision is expected to last.
    """

    def __init__(self, stage: StageContext, groups: LayerGroups, batches_to_gain: Callable[[], int]) -> None:
        self._stage, self._config, self._comm = stage, stage.config, stage.comm
        self._batches_to_gain, self.groups = batches_to_gain, groups
        self.memory = MemoryLimit(stage)
        self.cost_model = CostModel()
        self.profile: Profile | None = None
        self._reading: Aside[Measured] | None = None
        self._deciding: Aside[tuple[Decision, float]] | None = None
        self._request: Request | None = None  # that is being decided

    @property
    def _is_first(self) -> bool:
        return self._comm.here.rank == 0

    @property
    def chooses_schedule(self) -> bool:
        """Whether decisions choose a schedule too."""
        return self._stage.schedule.may_choose_schedule and self._stage.placement.num_stages > 1

    # -- profiles -------------------------------------------------------------------------------------

    def begin_to_read(self, posted: PostedProfile) -> None:
        """Begin to read a profile. Collective. :meth:`read` follows, or :meth:`forget`."""
        limit_bytes = self.memory.bytes()
        if not self._is_first:
            return
        cost_model, given = (
            deepcopy(self.cost_model),
            self._input(assume_running_schedule=False, limit_bytes=limit_bytes),
        )

        def read() -> Measured:
            profile, move_seconds = posted.read()
            cost_model.profiled(profile, move_seconds)
            if cost_model.first_seconds is None:
                cost_model.begin(given(profile, speeds=cost_model.history.speeds))
            return Measured(profile, cost_model)

        self._reading = Aside("gathering the profile", read)

    def read(self) -> Profile:
        """Wait for the profile, and adopt it with its estimates. Collective.

        Raises:
            PartitionError: on every rank; a layer did not run.
            MigrationError: on every rank, harmless; a rank cannot size its layers.
        """
        reading, self._reading = self._reading, None

        def adopt() -> Profile:
            assert reading is not None, "begin_to_read comes first"
            measured = reading.result()
            self.cost_model = measured.cost_model
            return measured.profile

        try:
            self.profile = self._comm.on_first("reading the profile", adopt)
        except Exception:
            self.forget()
            raise
        return self.profile

    def forget(self) -> None:
        """Forget a profile that is being read, and a decision that is being made: what they are of has changed."""
        self._reading = self._deciding = self._request = None

    # -- decisions ------------------------------------------------------------------------------------

    def begin_to_decide(self, request: Request, *, weighs_shapes: bool) -> None:
        """Begin to decide, from the profile that is being read, or else from the latest. Collective.

        Args:
            weighs_shapes: whether other shapes of placements are weighed than the present one.
        """
        limit_bytes, self._request = self.memory.bytes(), request
        if not self._is_first:
            return
        given = self._input(limit_bytes=limit_bytes, shapes=self._shapes(), weighs_shapes=weighs_shapes)
        reading, latest, cost_model = self._reading, self.profile, self.cost_model

        def decision() -> tuple[Decision, float]:
            if reading is not None:
                measured = reading.result()
            else:
                assert latest is not None, "there is no profile"
                measured = Measured(latest, cost_model)
            began, (profile, costs) = time.perf_counter(), (measured.profile, measured.cost_model)
            if request.reason.is_automatic:
                smoothed, tradeoff = costs.history.smoothed(profile), costs.tradeoff()
                found = decide(given(smoothed, speeds=costs.history.speeds, tradeoff=tradeoff))
            else:
                found = decide(given(profile, speeds=costs.history.speeds))
            return found, time.perf_counter() - began

        self._deciding = Aside(DECIDING, decision)

    def decides(self, request: Request) -> bool:
        """Return whether the decision on ``request`` has begun."""
        return self._request is request

    def decision(self) -> tuple[Decision, float]:
        """Wait for the decision that was begun. Collective.

        Returns:
            The decision, and the seconds that it took.

        Raises:
            PartitionError, MigrationError: on every rank; the latter harmless, as if it takes longer than
                ``dynmo.timeout_seconds``.
        """
        deciding, self._deciding, self._request = self._deciding, None, None

        def of_first() -> tuple[Decision, float]:
            assert deciding is not None, "begin_to_decide comes first"
            return deciding.result(self._config.timeout_seconds)

        decision, seconds = self._comm.on_first(DECIDING, of_first)
        self.cost_model.decided(decision)
        return decision, seconds

    def predict(self, new: Placement, *, assume_running_schedule: bool = True) -> Decision | None:
        """Search the schedule for ``new``, by the latest profile; None without one. Collective.

        Args:
            assume_running_schedule: as in :meth:`input`.
        """
        limit_bytes, profile = self.memory.bytes(), self.profile
        if profile is None:
            return None

        def decision() -> Decision:
            return predict(self.input(profile, limit_bytes, assume_running_schedule=assume_running_schedule), new)

        return self._comm.on_first(DECIDING, decision)

    def input(
        self, profile: Profile, limit_bytes: int | None, *, smoothed: bool = False, assume_running_schedule: bool = True
    ) -> DecisionInput:
        """Build the input of a decision under the present placement. On rank 0: others have no estimates.

        Args:
            smoothed: average the costs of ``profile`` over earlier profiles.
            assume_running_schedule: assume the schedule that runs now; False: assume DeepSpeed's 1F1B.
        """
        history = self.cost_model.history
        given = self._input(assume_running_schedule=assume_running_schedule, limit_bytes=limit_bytes)
        return given(history.smoothed(profile) if smoothed else profile, speeds=history.speeds)

    def _input(self, *, assume_running_schedule: bool = True, **values: Any) -> Callable[..., DecisionInput]:
        """Return a function that completes the input of a decision at present by a profile and what was learnt."""
        schedule, placement = self._stage.schedule, self._stage.placement
        counts, micro_batches = assume_running_schedule and self.chooses_schedule, self._stage.counters.micro_batches
        return partial(
            DecisionInput,
            placement=placement,
            config=self._config,
            groups=self.groups,
            checkpoint_interval=self.memory.checkpoint_interval,
            batches=self._batches_to_gain(),
            searches=schedule.may_choose_schedule,
            running_schedule=schedule.schedule_for(placement, micro_batches) if counts else None,
            running_over_bound=schedule.over_bound,
            back_to_back=schedule.back_to_back,
            **values,
        )

    def _shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of placements that a decision may propose; (): the present one's."""
        here, layers = self._stage.placement, self._stage.layers
        fits = self.groups.num_groups >= 2 * here.num_stages > 2
        may = self._config.schedule.kind == "auto" and why_one_chunk(self._config, layers.dynamic_shape) is None
        return get_args(Shape) if may and fits else ()
