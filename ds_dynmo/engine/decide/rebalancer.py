"""Rebalancing: from a profile to a decision, and from a decision to a move.

Rank 0 decides, and broadcasts what it decided and what it read in the profile. Every rank carries it out. Until layers
start to move, a failure changes nothing, and is every rank's.

    after a batch:                                  after_batch, decide_and_move_or_stay, post_profile
    engine.rebalance():                             decide_on_request
    engine.rebalance(partition), initialize:        move_to_partition
    a load, engine.repack() without other stages:   move_to

With ``migration.kind`` "background" a move begins right before the next batch (:meth:`Rebalancer.begin_move`) and has
ended when that batch has (:meth:`Rebalancer.end_move`). Profiles are gathered and decisions taken meanwhile, too, in
threads of rank 0. Between two batches no layer is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ds_dynmo.engine.decide import cycle as events
from ds_dynmo.engine.decide.cycle import Cycle, DecidedMove, Event, Measuring, Moving, Reason, Request, after
from ds_dynmo.engine.decide.decider import DECIDING, Decider
from ds_dynmo.engine.decide.decision import fits, moved_bytes
from ds_dynmo.engine.decide.decision_input import memory_model
from ds_dynmo.engine.decide.made_reports import measured_report, rebalance_report
from ds_dynmo.engine.decide.reporter import Reporter
from ds_dynmo.engine.events import LayersMoved
from ds_dynmo.engine.measure.profile_reduction import PostedProfile
from ds_dynmo.engine.measure.profiler import Profiler
from ds_dynmo.engine.move.background import BackgroundMove, TransferBudget
from ds_dynmo.engine.move.migrator import MoveCheck, MoveResult
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.validation import why_one_chunk
from ds_dynmo.errors import MigrationError, PartitionError, raise_unless_harmless
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan, Profile, RebalanceReport
from ds_dynmo.schedules import FoundSchedule, PassCosts


class Rebalancer:
    """Profiles, decides and moves layers.

    Attributes:
        cycle: where the run is between decisions.
        decider: reads profiles and decides.
        last_move_step: ``global_steps`` of the last move; None: layers never moved.
        budget: bytes to move while a batch trains.
        failure: why the latest automatic decision was not carried out; None: no failure since the last request.

    Args:
        migrate: carries out a plan after a check that may raise, and returns the bytes moved. Collective.
        background: carries out a plan while the next batch trains.
        lacks_data: returns whether the engine has no data to train on.
    """

    def __init__(
        self,
        stage: StageContext,
        *,
        groups: LayerGroups,
        profiler: Profiler,
        reporter: Reporter,
        migrate: Callable[[MigrationPlan, MoveCheck], int],
        background: BackgroundMove,
        lacks_data: Callable[[], bool],
    ) -> None:
        self._stage, self._config, self._comm = stage, stage.config, stage.comm
        self._profiler, self._reporter = profiler, reporter
        self._migrate, self._background = migrate, background
        self._lacks_data = lacks_data
        self.cycle = Cycle.begin(stage.config)
        self.decider = Decider(stage, groups, lambda: self.cycle.batches_to_gain)
        self.last_move_step: int | None = None
        self.failure: Exception | None = None
        self._move_seconds = 0.0  # of moves since the last profile, on this rank
        self._profile_seconds = 0.0  # spent gathering the latest profile
        self._waits_for_profile = False
        self.budget = TransferBudget()
        stage.layers_moved.subscribe("measurements and estimates are of the stages before", self._layers_moved)

    @property
    def profile(self) -> Profile | None:
        """The latest profile, the same on every rank; None before the first."""
        return self.decider.profile

    def go(self, event: Event) -> None:
        """Let the cycle see an event. Every rank sees the same."""
        self.cycle = after(self.cycle, event)

    # -- after a batch --------------------------------------------------------------------------------

    def after_batch(self) -> Request | None:
        """Count a trained batch, and read the profile that is due. Collective. :meth:`post_profile` follows.

        Returns:
            The request of a decision that is due now; None: none is.
        """
        self.go(events.BatchEnded(self._stage.counters.steps))
        if self._needs_profile_now and not isinstance(self.cycle.state, Measuring):
            self._post_due_profile(waits=True)
        try:
            request = self.read_profile()
        except (PartitionError, MigrationError) as error:
            self._stay(error)
            return None
        return request if not self._waits_for_profile else None

    def post_profile(self) -> None:
        """Post the profile that is due, which is gathered while the next batch trains. Collective.

        If layers move in that batch, it would be dropped, so it is not gathered.
        """
        if self._config.migration.kind == "background" and self.cycle.decided is None:
            self._post_due_profile(waits=False)

    @property
    def _needs_profile_now(self) -> bool:
        """Whether training waits for the profile that is due: a model may have changed again before the next batch."""
        return self._config.migration.kind == "blocking" or self._waits_for_profile or self.cycle.due.urgent

    def decide_and_move_or_stay(self, request: Request) -> None:
        """Decide and move layers; if that fails harmlessly, warn on rank 0 and continue. Collective."""
        try:
            move = replace(self._decided_move(request, self._profile_seconds), clears_pending_decision=False)
            if self._config.migration.kind == "background":
                self._move_in_background(move)
            else:
                self._move_now(move)
        except (PartitionError, MigrationError) as error:
            self._stay(error)

    def report_profile(self) -> None:
        """Write the latest profile once, after its decision."""
        if not self._waits_for_profile:
            self._reporter.profiled(self.profile, self._stage.counters.samples)

    def _stay(self, error: Exception) -> None:
        raise_unless_harmless(error)
        self.failure = error
        self._reporter.warn(f"DynMo step {self._stage.counters.steps}: no layer was moved: {error}")
        self._profiler.forget()

    # -- by hand --------------------------------------------------------------------------------------

    def decide_on_request(self, train: Callable[[], Any], *, background: bool = False) -> RebalanceReport | None:
        """Decide now from the latest profile; without one, train until there is one. Collective.

        Args:
            train: trains a batch on the engine's data. Collective.
            background: whether to move while the next batch trains; the report then follows.
        """
        self.collect_profile()
        profile_seconds = self.train_until_profiled(train) if self.profile is None else 0.0
        move = self._decided_move(Request(Reason.BY_HAND), profile_seconds)
        report = self._move_in_background(move) if background else self._move_now(move)
        self._reporter.profiled(self.profile, self._stage.counters.samples)
        return report

    def train_until_profiled(self, train: Callable[[], Any]) -> float:
        """Train until there is a profile, without a decision, and return the seconds of gathering it. Collective.

        Args:
            train: as for :meth:`decide_on_request`.

        Raises:
            MigrationError: harmless; there is no data to train on.
        """
        self._comm.enter("rebalance")
        lacking = torch.tensor([float(self._lacks_data())], device="cpu")
        if self._comm.max_over_world(lacking).item():
            raise MigrationError(
                "rebalance: there is no profile yet and no data to train on. Train a batch first", harmless=True
            )
        self.drop_decided_move()
        due = self.cycle.due.request
        self.go(events.Asked(Request(Reason.BY_HAND)))
        self.failure, self._waits_for_profile = None, True
        try:
            while self.profile is None:
                train()
                if self.failure is not None:
                    raise self.failure
        finally:
            self._waits_for_profile = False
            self.go(events.Settled(moved=False))  # the caller decides
            self.go(events.NotMade(due))  # until it has
        return self._profile_seconds

    def model_changed(self, reason: str) -> None:
        """Update after the model's work changed: the next batch is profiled and a decision follows."""
        self._drop_posted_profile()
        self._profiler.forget(batches_too=True)
        self.decider.cost_model.model_changed()
        self.go(events.ModelChanged(reason))

    # -- profile, decide, move ------------------------------------------------------------------------

    def _post_due_profile(self, *, waits: bool) -> None:
        """Post the measurements of the batches so far, if a measurement or a decision is due. Collective.

        Args:
            waits: whether training waits for the profile now; else the batch's loss may be on its way still, too.
        """
        if not self.cycle.is_profile_due(self._profiler.batches):
            return
        with self._stage.timeline.phase("profile", "post the profile"):
            began = time.perf_counter()
            if waits:
                self._comm.enter("rebalance")
            self.decider.begin_to_read(PostedProfile(self._stage, self._profiler, self._move_seconds))
            self._profiler.forget()
            self._profile_seconds = time.perf_counter() - began
        request = self.cycle.due.request
        self.go(events.ProfilePosted())
        if request is not None and not waits:
            self._begin_to_decide(request)

    def read_profile(self) -> Request | None:
        """Read the profile that was posted; without one do nothing. Collective.

        Returns:
            The request of the decision that it was gathered for; None: there is none.

        Raises:
            PartitionError: on every rank; a layer did not run.
            MigrationError: on every rank, harmless; a rank cannot size its layers.
        """
        if not isinstance(self.cycle.state, Measuring):
            return None
        due = self.cycle.state.due
        with self._stage.timeline.phase("profile", "read the profile"):
            began = time.perf_counter()
            self._comm.enter("rebalance")
            try:
                profile = self.decider.read()
            except (PartitionError, MigrationError):
                self.go(events.ProfileUnread())
                raise
            self._move_seconds = 0.0
            self._profile_seconds += time.perf_counter() - began
        self.go(events.ProfileRead())
        if due.measurement:
            self._reporter.measured(measured_report(profile, self.last_move_step), self._stage.counters.samples)
        return due.request

    def collect_profile(self) -> None:
        """Read the profile that is on the way before a decision by hand. Collective.

        The decision that it was gathered for stays due until another is made; if the profile cannot be read, the latest
        one stays, and that decision is dropped.
        """
        try:
            request = self.read_profile()
        except (PartitionError, MigrationError) as error:
            self._stay(error)
        else:
            self.go(events.NotMade(request))

    def _drop_posted_profile(self) -> None:
        """Drop the profile on the way: layers were elsewhere when it was measured, or cost something else."""
        self.decider.forget()
        self.go(events.ProfileDropped())

    def _decided_move(self, request: Request, profile_seconds: float) -> DecidedMove:
        """Decide from the latest profile, if that has not begun yet. Collective."""
        self._comm.enter("rebalance")
        if not self.decider.decides(request):
            self._begin_to_decide(request)
        with self._stage.timeline.phase("decide", "decide"):
            decision, seconds = self.decider.decision()
        return DecidedMove(decision.placement, request, decision, self.decider.profile, (profile_seconds, seconds))

    def _begin_to_decide(self, request: Request) -> None:
        weighs_shapes = self.cycle.weighs_shapes(request)
        if weighs_shapes:
            self.go(events.Weighed())
        self.decider.begin_to_decide(request, weighs_shapes=weighs_shapes)

    def move_to(self, new: Placement, request: Request, *, clears_pending_decision: bool = True) -> RebalanceReport:
        """Move layers to ``new``, which the user chose, and train by the schedule found for it. Collective.

        Args:
            new: the same on all ranks.
            clears_pending_decision: whether to drop a pending decision.
        """
        return self._move_now(self._chosen(new, request, clears_pending_decision=clears_pending_decision))

    def _chosen(self, new: Placement, request: Request, *, clears_pending_decision: bool = True) -> DecidedMove:
        """Return a move to ``new`` with the schedule from the latest profile. Collective."""
        began = time.perf_counter()
        decision = self.decider.predict(new)
        seconds = 0.0, time.perf_counter() - began
        return DecidedMove(new, request, decision, None, seconds, clears_pending_decision)

    def _move_now(self, move: DecidedMove) -> RebalanceReport:
        """Move layers between two batches. Collective."""
        self.settle()
        with self._stage.timeline.phase("migrate", "migrate"):
            plan, began = MigrationPlan.between(self._stage.placement, move.target), time.perf_counter()
            bytes_moved = self._migrate(plan, partial(self.decider.memory.check, profile=move.profile))
            self.drop_decided_move()
            if plan.new != plan.old:
                self._stage.publish_move()
            return self._moved(move, plan, bytes_moved, time.perf_counter() - began)

    def _move_in_background(self, move: DecidedMove) -> RebalanceReport | None:
        """Move layers while the next batch trains, if one has to move. Collective.

        Returns:
            The report, if no layer has to move.
        """
        if move.target == self._stage.placement:
            return self._move_now(move)
        self.go(events.Chosen(move))
        return None

    def _moved(
        self,
        move: DecidedMove,
        plan: MigrationPlan,
        bytes_moved: int,
        waited_seconds: float,
        *,
        background_seconds: float | None = None,
    ) -> RebalanceReport:
        """Report a move, and train by the schedule found for it. Collective.

        Args:
            waited_seconds: that training waited for it.
            background_seconds: from the beginning to the end of a move while a batch trained; None: training waited.
        """
        in_batch = background_seconds is not None
        if plan.moves and self.profile is not None:
            self.decider.cost_model.moved(self.profile, plan)
            self._move_seconds += waited_seconds
        if in_batch:
            self.go(events.Ended(moved=True))
        else:
            self.go(events.Settled(bool(plan.moves), move.clears_pending_decision))
        report = rebalance_report(
            plan,
            move.decision,
            step=self._stage.counters.steps,
            request=move.request,
            bytes_moved=bytes_moved,
            seconds=(*move.seconds, waited_seconds),
            background_seconds=background_seconds,
            load_signals=tuple(layer.load_signal for layer in self.profile.layers) if self.profile else (),
        )
        self._report_schedule()
        self._reporter.rebalanced(report, self._stage.counters.samples)
        if move.decision is not None:
            self._train_by(move.decision.found, move.decision.pass_costs)
            self._report_schedule()
        return report

    def _report_schedule(self) -> None:
        """Record the order of passes in force; without a profile do nothing."""
        if self.profile is not None:
            placement, micro_batches = self._stage.placement, self.profile.micro_batches
            chosen = (
                self._stage.schedule.schedule_for(placement, micro_batches) if self.decider.chooses_schedule else None
            )
            self._reporter.scheduled(self._stage.counters.steps, chosen)

    # -- while a batch trains -------------------------------------------------------------------------

    def begin_move(self) -> None:
        """Begin the move that was decided, right before a batch; without one do nothing. Collective.

        It goes only as far as its bytes are expected to arrive in time; the next batch continues. Training waits for it
        where memory does not suffice for a move during a batch, or if the model has changed since, which makes the
        profile of the next batch urgent.
        """
        self.settle()
        move = self.cycle.decided
        if move is None:
            return
        self._comm.enter("rebalance")
        with self._stage.timeline.phase("migrate", "begin to migrate"):
            try:
                self._begin(move)
            except (PartitionError, MigrationError) as error:
                self.drop_decided_move()
                self._stay(error)

    def _begin(self, move: DecidedMove) -> None:
        limit_bytes = self.decider.memory.bytes()
        new = self._comm.on_first(DECIDING, lambda: self._next_placement(move, limit_bytes))
        plan = MigrationPlan.between(self._stage.placement, new)
        if self.cycle.due.urgent or not self.decider.memory.fits(plan, self.profile, overlapped=True):
            self._move_now(replace(move, clears_pending_decision=False))
            return
        is_whole = new == move.target and not move.has_begun
        part = move if is_whole else self._chosen(new, move.request)
        self._background.begin(plan)
        rest = None if new == move.target else replace(move, has_begun=True)
        self.go(events.Begun(Moving(part, plan, rest)))

    def _next_placement(self, move: DecidedMove, limit_bytes: int | None) -> Placement:
        """Return where ``move`` goes while the next batch trains."""
        here, profile = self._stage.placement, self.profile
        if profile is None:
            return move.target
        memory = memory_model(profile, limit_bytes, self.decider.memory.checkpoint_interval)

        def allows(placement: Placement) -> bool:
            return self.decider.groups.allows(placement.boundaries) and fits(memory, placement)

        return self.budget.next_placement(
            here,
            move.target,
            allows=allows,
            bytes_to=lambda placement: moved_bytes(profile, MigrationPlan.between(here, placement)),
        )

    def end_move(self) -> None:
        """Report the move that ended with the batch; without one do nothing. Collective."""
        if not isinstance(moving := self.cycle.state, Moving):
            return
        move, plan = moving.move, moving.plan
        outcome, began = self._background.take_outcome(), time.perf_counter()
        assert outcome is not None, "no schedule ran"
        self._profiler.forget(batches_too=True)
        result = outcome.result
        if not isinstance(result, MoveResult):
            self.go(events.Ended(moved=False))
            self.failure = result
            self._reporter.warn(f"DynMo step {self._stage.counters.steps}: no layer was moved: {result}")
            return
        if self.profile is not None:
            self.budget.record(moved_bytes(self.profile, plan), result.share_in_time)
        waited_seconds = result.waited_seconds + time.perf_counter() - began
        self._moved(move, plan, result.bytes_moved, waited_seconds, background_seconds=outcome.seconds)

    def interrupt_move(self) -> None:
        """Drop the move of a batch that an exception has ended. :meth:`settle` follows."""
        if isinstance(self.cycle.state, Moving):
            self._background.interrupt()
        self.go(events.Interrupted())

    def settle(self) -> None:
        """Finish what an exception in a batch has left of a move. Collective."""
        self._background.settle()

    def drop_decided_move(self) -> None:
        """Forget a move that has not begun: what it was decided from has changed."""
        self.go(events.Forgotten())

    def _train_by(self, found: FoundSchedule | None, costs: PassCosts | None) -> None:
        """Train by ``found``, searched under ``costs``, from the next batch on; None: DeepSpeed's 1F1B."""
        if not self.decider.chooses_schedule:
            return
        if found is None:
            self._stage.schedule.decide(None)
        else:
            self._stage.schedule.decide(found.schedule, costs, over_bound=found.over_bound)

    # -- for the repacker and checkpoints --------------------------------------------------------

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint's :meth:`Cycle.saved`. Collective."""
        self._drop_posted_profile()
        self.cycle = self.cycle.resumed(saved)

    def nearest_allowed(self, placement: Placement) -> Placement:
        """Find the nearest placement that ``dynmo.keep_together`` allows; log it if it is not ``placement``."""
        nearest = placement.at(self.decider.groups.nearest(placement.boundaries))
        if nearest != placement:
            try:
                self.decider.groups.check(placement.boundaries)
            except PartitionError as error:
                self._reporter.inform(f"DynMo: the nearest allowed partition is {nearest}: {error}")
        return nearest

    def move_to_partition(
        self, partition: Sequence[int], request: Request, *, what: str = "rebalance", background: bool = False
    ) -> RebalanceReport | None:
        """Move layers to exactly ``partition``. Collective.

        Args:
            what: the engine's method that the user called, for messages.
            background: whether to move while the next batch trains; the report then follows.

        Raises:
            PartitionError: on every rank, if ``partition`` is invalid on one rank, or cuts a group of
                ``keep_together``. Nothing has changed.
            MigrationError: see its message.
        """

        if background:
            self.collect_profile()  # layers move in the next batch
        self._comm.enter(what)
        new = self._comm.everywhere(
            "going to a given partition",
            lambda: self.placement_of(partition, self._stage.placement.num_stages),
            same=self._stage.placement_change_text,
        )
        move = self._chosen(new, request, clears_pending_decision=request.reason is not Reason.INITIAL)
        return self._move_in_background(move) if background else self._move_now(move)

    def placement_of(self, partition: Sequence[int], num_stages: int) -> Placement:
        """Return the placement with these boundaries on ``num_stages`` stages.

        One more than there are stages are those of a chain. Two per stage and one, on two stages or more, are those of
        the present shape, from a chain of a V, or of a loop if ``schedule.kind`` is "loop".

        Raises:
            PartitionError: other boundaries, or they cut a group of ``keep_together``, or the model sends shapes that
                change.
        """
        here, shape = self._stage.placement, self._stage.placement.shape_on(num_stages)
        if len(partition) == num_stages + 1:
            shape = "chain"
        elif shape == "chain" and len(partition) == 2 * num_stages + 1 and num_stages > 1:
            shape = "loop" if self._config.schedule.kind == "loop" else "v"
        new = Placement.of_shape(shape, partition, num_layers=here.num_layers, num_stages=num_stages)
        if (why := self.why_not(new)) is not None:
            raise PartitionError(f"partition {list(partition)}: {why}")
        self.decider.groups.check(new.boundaries)
        return new

    def why_not(self, placement: Placement) -> str | None:
        """Return why this engine cannot train at a placement; None: it can."""
        return None if placement.shape == "chain" else why_one_chunk(self._config, self._stage.layers.dynamic_shape)

    def _layers_moved(self, moved: LayersMoved) -> None:
        self.last_move_step = moved.step
        self.drop_decided_move()
        self._drop_posted_profile()
        self._profiler.forget(batches_too=True)
        if moved.stages_changed:  # estimates of layers stay valid
            self.decider.cost_model.stages_changed()
            self._stage.schedule.forget()
            self._move_seconds = 0.0
            if self.profile is not None:
                self.decider.profile = replace(self.profile, placement=moved.placement)
            decision = self.decider.predict(moved.placement, assume_running_schedule=False)
            if decision is not None:
                self._train_by(decision.found, decision.pass_costs)
            self.go(events.Settled(moved=True))
