"""Re-packing: continue with fewer or more ranks. ``engine.repacker`` decides, changes the world and reports."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from typing import Any

from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.decide.reporter import Reporter
from ds_dynmo.engine.decide.trigger import Reason, Request
from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline
from ds_dynmo.engine.move.migrator import Migrator
from ds_dynmo.engine.resize import growing, parking
from ds_dynmo.engine.resize.data_position import DataPosition
from ds_dynmo.engine.resize.decision import StageDecision
from ds_dynmo.engine.resize.extra_replicas import merge_replicas, replica_multiplier_for
from ds_dynmo.engine.resize.job_ranks import JobRanks
from ds_dynmo.engine.resize.job_state import Stateful
from ds_dynmo.engine.resize.release import policy_for
from ds_dynmo.engine.resize.release.runner import PolicyRunner
from ds_dynmo.engine.resize.restart import save_for_restart
from ds_dynmo.engine.resize.shrinking import shrink
from ds_dynmo.engine.resize.world import World
from ds_dynmo.engine.resize.world_change import RepackResult, WorldChange
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import counted
from ds_dynmo.placement import Placement
from ds_dynmo.plan import RepackReport


class Repacker:
    """One rank's part in releasing and recalling stages.

    Attributes:
        ranks: of the job.
        data: this rank's position in its data.

    Args:
        engine: DeepSpeed's engine, which is rebuilt for another world.
        progress: counters that are the same on every rank of the job.
        save_checkpoint: ``engine.save_checkpoint``, of a folder and a tag.
        wait_for_save: ``engine.wait_for_save``.
    """

    def __init__(
        self,
        engine: DeepSpeedPipeline,
        stage: StageContext,
        rebalancer: Rebalancer,
        migrator: Migrator,
        reporter: Reporter,
        ranks: JobRanks,
        data: DataPosition,
        *,
        progress: Stateful,
        save_checkpoint: Callable[[str, str], Any],
        wait_for_save: Callable[[], None],
    ) -> None:
        self._stage, self._config, self._comm = stage, stage.config, stage.comm
        self._rebalancer, self._reporter = rebalancer, reporter
        self._save_checkpoint, self._wait_for_save = save_checkpoint, wait_for_save
        self.ranks, self.data = ranks, data
        self._change = WorldChange(engine, stage, rebalancer, migrator, ranks, data, progress)
        self._decision = StageDecision(stage, rebalancer, ranks)
        self._finishes_at_exit = False
        repack = self._config.repack
        self._policy = policy_for(repack)
        self._policy_runner = PolicyRunner(
            self._policy,
            reporter.warn,
            reporter.inform,
            have_exited=ranks.have_exited,
            patience_seconds=self._config.timeout_seconds,
            delay_seconds=repack.release_delay_seconds,
        )

    @property
    def world(self) -> World:
        """The ranks at work."""
        return self.ranks.world

    @property
    def released(self) -> bool:
        """Whether this rank's accelerator was handed back."""
        return self.ranks.released

    # -- for users ------------------------------------------------------------------------------

    def repack(
        self, num_stages: int | None = None, *, partition: Sequence[int] | None = None, train: Callable[[], Any]
    ) -> RepackReport:
        """Continue with fewer ranks, or recall parked ones. Collective over the ranks at work, between two batches.

        Layers, optimizer state and master weights move as in a rebalance. All replicas release the same stages; the
        first and the last stage keep their ranks as long as there are two. Other ranks are released according to
        ``dynmo.repack.release``; afterwards ``engine.released`` is True on them.

        Args:
            num_stages: the new number of stages; None: the number that ``dynmo.repack`` finds best.
            partition: the new boundaries; None: ``dynmo.balancer`` chooses them, or before the first profile an even
                split of parameters.
            train: trains a batch on the engine's data, if a profile is needed first. Collective.

        Raises:
            PartitionError: more stages than there are or than layers, fewer than 1, a partition that cuts a group
                of ``keep_together``, or no partition fits in memory. Nothing has changed.
            MigrationError: see its message; nothing has changed unless it says that layers had begun to move.
        """
        self._rebalancer.collect_profile()
        if self._rebalancer.profile is None and num_stages is None and partition is None:
            self._rebalancer.train_until_profiled(train)
        began = time.perf_counter()
        self._comm.enter("repack")
        new, verdict = self._decision.by_hand(num_stages, partition)
        return self._repack(new, Request(Reason.BY_HAND), verdict, time.perf_counter() - began)

    def most_stages(self) -> int:
        """Count the stages that a re-packing can use now: at work or parked."""
        return self.ranks.stages.most

    def wait_for_recall(self) -> bool:
        """Wait until this rank is recalled (True) or the job has ended (False).

        Return True at once on a rank at work, and False at once if released ranks are not parked.
        """
        if not self.released:
            return True
        if not self._policy.parks:
            return False
        world = self.ranks.world
        timeout_seconds = self._config.timeout_seconds
        while recall := parking.await_recall(world.store, world.launch_rank, timeout_seconds):
            growing.rejoin(self._change, recall)
            if not self.released:
                return True
        return False

    def dismiss_parked(self) -> None:
        """End parked ranks. Rank 0 does so too when its process ends."""
        if not self.released:
            self.ranks.dismiss()

    def share_state(self, name: str, holder: Stateful) -> None:
        """Keep the state of ``holder`` through re-packings: see ``engine.share_state``."""
        self._change.shared_states[name] = holder

    # -- for the engine ------------------------------------------------------------------------

    def repack_if_better(self, request: Request) -> bool:
        """Re-pack if the planner finds another number of stages better; return whether it did. Collective.

        Raises:
            PartitionError, MigrationError: harmless unless the message says otherwise.
        """
        began = time.perf_counter()
        self._comm.enter("repack")
        new = self._decision.automatic()
        if new.num_stages == self._stage.placement.num_stages:
            return False
        verdict = f"best by planner {self._config.repack.planner}"
        self._repack(new, request, verdict, time.perf_counter() - began)
        return True

    # -- wiring ---------------------------------------------------------------------------------------

    def _repack(self, new: Placement, request: Request, verdict: str, decide_seconds: float) -> RepackReport:
        counters, old = self._stage.counters, self._stage.placement
        step = counters.steps
        before, after = self._decision.predicted_seconds(old), self._decision.predicted_seconds(new)
        self._reporter.profiled(self._rebalancer.profile, counters.samples)  # the next one is of other stages
        if new.num_stages != old.num_stages:
            self._wait_for_save()  # its ranks finish it together
        if self._policy.restarts and new.num_stages < old.num_stages:
            result, saved = self._stop_for_restart(new)
            verdict = f"{verdict}; {saved}"
        elif new.num_stages == old.num_stages:
            moved = self._rebalancer.move_to(new, Request(Reason.EXPLICIT))
            result = RepackResult((), (), moved.layers_moved, moved.bytes_moved, moved.migrate_seconds)
        else:
            result = self._resize(new)
        if self._rebalancer.profile is not None:
            after = self._decision.predicted_seconds(new)  # with the present number of replicas
        report = RepackReport(
            step=step,
            reason=str(request),
            old_placement=old,
            new_placement=new,
            released_ranks=result.released_ranks,
            recalled_ranks=result.recalled_ranks,
            iteration_seconds_before=before,
            iteration_seconds_after=after,
            layers_moved=result.layers_moved,
            bytes_moved=result.bytes_moved,
            decide_seconds=decide_seconds,
            migrate_seconds=result.migrate_seconds,
            world_seconds=result.world_seconds,
            verdict=verdict,
            replica_multiplier=self.world.replica_multiplier,
            model_changed=request.reason is Reason.MODEL_CHANGED,
        )
        self._reporter.repacked(report, counters.samples)
        return report

    def _resize(self, new: Placement) -> RepackResult:
        """Continue with another number of stages."""
        change, ranks = self._change, self.ranks
        plan = self._decision.plan(new)
        self._rebalancer.memory.check(plan.migration)
        if len(plan.stages) > len(self.world.launch_stages_at_work):
            return growing.grow(change, plan)
        wants_replicas = self._config.repack.freed_ranks == "replicas" and not self._stage.replicas_would_differ
        multiplier = replica_multiplier_for(change, new.num_stages) if wants_replicas else 1
        resize = merge_replicas if self.world.replica_multiplier > 1 else shrink
        result = resize(change, plan, park=self._policy.parks, replica_multiplier=multiplier)
        if self.world.launch_rank == 0 and result.released_ranks:
            self._finish_at_exit()
            self._policy_runner.release(*ranks.released_and_staying())
        return result

    def _stop_for_restart(self, new: Placement) -> tuple[RepackResult, str]:
        """Save a checkpoint with its launch, and release every rank; also return a clause for the verdict."""
        began = time.perf_counter()

        def save_whole(folder: str, tag: str) -> None:
            self._save_checkpoint(folder, tag)
            self._wait_for_save()

        launch = save_for_restart(self._stage, save_whole, new, self._change.shared_states)
        self.ranks.released = True
        ranks = self.world.launch_ranks(self.world.launch_stages_at_work)
        result = RepackResult(released_ranks=ranks, migrate_seconds=time.perf_counter() - began)
        return (
            result,
            f"saved as {launch.tag}, launch {counted(launch.ranks, 'rank')} in {counted(launch.num_stages, 'stage')}",
        )

    def _finish_at_exit(self) -> None:
        """Let rank 0 call :func:`_finish` when its process ends."""
        if self.world.launch_rank == 0 and not self._finishes_at_exit:
            self._finishes_at_exit = True
            atexit.register(_finish, self.ranks, self._policy_runner)


def _finish(ranks: JobRanks, policy_runner: PolicyRunner) -> None:
    """Dismiss parked ranks, which would wait until the store is gone, and finish a started release."""
    try:
        ranks.dismiss()
    finally:
        policy_runner.finish()
