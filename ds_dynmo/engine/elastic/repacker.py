"""Go on with fewer ranks, or with more: ``engine.repacker`` decides how many, changes the world and reports it."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from typing import Any

from ds_dynmo.engine.balancing.balancer import Balancer
from ds_dynmo.engine.balancing.trigger import Reason, Request
from ds_dynmo.engine.checkpoint.initial_model import InitialModelSpec
from ds_dynmo.engine.elastic import growing, parking
from ds_dynmo.engine.elastic.data_position import DataPosition
from ds_dynmo.engine.elastic.decision import StageDecision
from ds_dynmo.engine.elastic.extra_replicas import merge_replicas, replica_multiplier_for
from ds_dynmo.engine.elastic.job_ranks import JobRanks
from ds_dynmo.engine.elastic.job_snapshot import Stateful
from ds_dynmo.engine.elastic.job_spec import JobSpec, job_spec_of
from ds_dynmo.engine.elastic.join_client import join_job
from ds_dynmo.engine.elastic.release import policy_for
from ds_dynmo.engine.elastic.release.runner import PolicyRunner
from ds_dynmo.engine.elastic.restart import save_for_restart
from ds_dynmo.engine.elastic.shrinking import shrink
from ds_dynmo.engine.elastic.world import World
from ds_dynmo.engine.elastic.world_change import RepackResult, WorldChange, fatal_from_here
from ds_dynmo.engine.migration.migrator import Migrator
from ds_dynmo.engine.reporting import Reporter
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import ConfigError
from ds_dynmo.placement import Placement
from ds_dynmo.plan import RepackReport
from ds_dynmo.wording import counted


class Repacker:
    """Releases stages and takes them back; this is one rank's part in it.

    Attributes:
        ranks: of the job.
        data: where this rank is in its data.

    Args:
        initial_model: the model as it was built.
        progress: counters that are the same on every rank of the job.
        save_checkpoint: ``engine.save_checkpoint``, of a folder and a tag.
    """

    def __init__(
        self,
        stage: StageContext,
        balancer: Balancer,
        migrator: Migrator,
        reporter: Reporter,
        ranks: JobRanks,
        data: DataPosition,
        *,
        initial_model: Callable[[], InitialModelSpec],
        progress: Stateful,
        save_checkpoint: Callable[[str, str], Any],
    ) -> None:
        self._stage, self._config, self._comm = stage, stage.config, stage.comm
        self._balancer, self._reporter, self._initial_model = balancer, reporter, initial_model
        self._save_checkpoint = save_checkpoint
        self.ranks, self.data = ranks, data
        self._change = WorldChange(stage, balancer, migrator, ranks, data, progress)
        self._decision = StageDecision(stage, balancer, ranks)
        stage.optimizer.changed.subscribe("ranks of other launches need the same", self._optimizer_changed)
        self._joined = False  # in another job, which has not called this rank yet
        self._finishes_at_exit = False
        repack = self._config.repack
        self._policy = policy_for(repack)
        self._policy_runner = PolicyRunner(
            self._policy,
            reporter.warn,
            reporter.inform,
            attempts=repack.release_attempts,
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
        """Was this rank's accelerator handed back?"""
        return self.ranks.released

    # -- what users call ------------------------------------------------------------------------------

    def repack(
        self, num_stages: int | None = None, *, partition: Sequence[int] | None = None, train: Callable[[], Any]
    ) -> RepackReport:
        """Go on with fewer ranks, or take parked ones back. Collective over the ranks at work, between two batches.

        Layers, optimizer state and master weights move as in a rebalance. All replicas give up the same stages; the
        first and the last stage keep their ranks as long as there are two. Ranks that go are released as
        ``dynmo.repack.release`` says; afterwards ``engine.released`` is True on them.

        Args:
            num_stages: how many to go on with; None: as many as ``dynmo.repack`` finds best.
            partition: exactly the boundaries to go to; None: ``dynmo.balancer`` chooses them. Before the first profile
                it spreads parameters evenly.
            train: trains a batch on the data that the engine has, where a profile is needed first. Collective.

        Raises:
            PartitionError: more stages than there are or than layers, fewer than 1, a partition that cuts what
                ``keep_together`` keeps together, or no partition fits in memory. Nothing has changed.
            MigrationError: see its message; nothing has changed unless it says that layers had begun to move.
        """
        if self._balancer.profile is None and num_stages is None and partition is None:
            self._balancer.train_until_profiled(train)
        began = time.perf_counter()
        self._comm.enter("repack")
        self._admit()
        new, verdict = self._decision.by_hand(num_stages, partition)
        return self._repack(new, Request(Reason.BY_HAND), verdict, time.perf_counter() - began)

    def most_stages(self) -> int:
        """Count the stages that a re-packing can go on with now: at work, parked or joined. Collective."""
        self._comm.enter("most_stages")
        self._admit()
        return self._decision.most_stages

    def wait_for_recall(self) -> bool:
        """Wait until this rank is called back, True, or until the job has ended, False.

        True at once on a rank that was not released, False at once where released ranks are not parked.
        """
        if not self.released:
            return True
        if not (self._policy.parks or self._joined):
            return False
        world = self.ranks.world
        timeout_seconds = self._config.timeout_seconds
        while recall := parking.await_recall(world.store, world.launch_rank, timeout_seconds):
            growing.rejoin(self._change, recall)
            if not self.released:
                self._joined = False
                return True
        return False

    def join(self, job: Any) -> None:
        """Offer the ranks of this launch to a job that runs already, as stages that it can call like parked ones.

        Collective over this launch. Run the job's script with its arguments, in a launch of its own of any number of
        stages that holds the model, with as many replicas as the job; call this before the training loop and
        ``engine.wait_for_recall()`` next. ``engine.released`` is True until the job calls: by ``repack``, or because
        throughput asks for it. A rank reads on where the job is in ``training_data``; data that the script makes itself
        has to begin at ``engine.micro_batches_taken``, as after a checkpoint was loaded. Both are configured with
        ``dynmo.repack.accept_joins``, and prove to each other that they know the secret in DS_DYNMO_JOIN_SECRET.

        Args:
            job: "HOST:PORT", the job's MASTER_ADDR and MASTER_PORT; or the ``torch.distributed.Store`` of its launch.

        Raises:
            ConfigError: no job is there, or one that does not know the secret or differs in its model, configuration,
                replicas or versions (says in which), or this engine is without ``accept_joins``. Nothing has changed.
            MigrationError: a rank of this launch failed.
        """
        self._comm.enter("join")
        ranks, secret = self.ranks, self.ranks.secret
        if secret is None:
            raise ConfigError("engine.join: dynmo.repack.accept_joins = false: set it to true, in the job too")
        location, timeout_seconds = ranks.locations[self.world.launch_rank], self._config.timeout_seconds
        joined = join_job(job, self._describe(), location, self.world, self._comm, secret, timeout_seconds)
        with fatal_from_here("joining failed after this launch had given up its layers", "Launch it anew"):
            ranks.dismiss()  # who joined this launch meanwhile, or was parked: nobody would ever call it
            self._change.empty_stage()
            self._change.end()
            self._change.release_stage()
            self._joined = True
            ranks.become_part_of(joined)
        self._reporter.mute()  # the rank 0 of that job reports

    def dismiss_parked(self) -> None:
        """Tell parked ranks that the job has ended. Rank 0 does so too when its process ends."""
        if not self.released:
            self.ranks.dismiss()

    def share_state(self, name: str, holder: Stateful) -> None:
        """Keep the state of ``holder`` through re-packings: see ``engine.share_state``."""
        self._change.shared_states[name] = holder

    # -- what the engine calls ------------------------------------------------------------------------

    def accept_joins(self) -> None:
        """Let ranks of other launches join from now on, if they may at all. Called once the engine is complete."""
        self.ranks.accept_joins(self._describe(), self._stage.layers.num_layers, self._reporter.warn)

    def repack_if_better(self, request: Request) -> bool:
        """Re-pack if the planner finds another number of stages better; False if it does not. Collective.

        Raises:
            PartitionError, MigrationError: harmless unless the message says otherwise.
        """
        began = time.perf_counter()
        self._comm.enter("repack")
        self._admit()
        new = self._decision.automatic()
        if new.num_stages == self._stage.placement.num_stages:
            self.ranks.has_new = False
            return False
        verdict = f"best by planner {self._config.repack.planner}"
        self._repack(new, request, verdict, time.perf_counter() - began)
        return True

    # -- wiring ---------------------------------------------------------------------------------------

    def _optimizer_changed(self, _: None) -> None:
        """Require the new optimizer of launches that join from now on."""
        self.ranks.update_job(self._describe)

    def _describe(self) -> JobSpec:
        return job_spec_of(self._stage, self.ranks.world, self._initial_model())

    def _admit(self) -> None:
        """Add the ranks that have joined meanwhile to those that can be called. Collective."""
        joined = self.ranks.admit()
        if joined:
            self._reporter.inform(f"DynMo: ranks {list(joined)} have joined and can be called")
            self._finish_at_exit()

    def _repack(self, new: Placement, request: Request, verdict: str, decide_seconds: float) -> RepackReport:
        engine, old = self._stage.engine, self._stage.placement
        step = engine.global_steps
        before, after = self._decision.predicted_seconds(old), self._decision.predicted_seconds(new)
        self._reporter.profiled(self._balancer.profile, engine.global_samples)  # the next one is of other stages
        if self._policy.restarts and new.num_stages < old.num_stages:
            done, saved = self._stop_for_restart(new)
            verdict = f"{verdict}; {saved}"
        elif new.num_stages == old.num_stages:
            moved = self._balancer.go_to(new, Request(Reason.EXPLICIT))
            done = RepackResult((), (), moved.layers_moved, moved.bytes_moved, moved.migrate_seconds)
        else:
            done = self._resize(new)
        self.ranks.has_new = False
        if self._balancer.profile is not None:
            after = self._decision.predicted_seconds(new)  # with the present number of replicas
        report = RepackReport(
            step=step,
            reason=str(request),
            old_placement=old,
            new_placement=new,
            released_ranks=done.released_ranks,
            recalled_ranks=done.recalled_ranks,
            iteration_seconds_before=before,
            iteration_seconds_after=after,
            layers_moved=done.layers_moved,
            bytes_moved=done.bytes_moved,
            decide_seconds=decide_seconds,
            migrate_seconds=done.migrate_seconds,
            world_seconds=done.world_seconds,
            verdict=verdict,
            replica_multiplier=self.world.replica_multiplier,
            model_changed=request.reason is Reason.MODEL_CHANGED,
        )
        self._reporter.repacked(report, engine.global_samples)
        return report

    def _resize(self, new: Placement) -> RepackResult:
        """Go on with another number of stages."""
        change, ranks = self._change, self.ranks
        plan = self._decision.plan(new)
        self._balancer.memory.check(plan.moves)
        if len(plan.stages) > len(self.world.stages):
            return growing.grow(change, plan, self._decision.first_seconds_with(new) if ranks.has_new else None)
        wants_replicas = self._config.repack.freed_ranks == "replicas" and not self._stage.replicas_would_differ
        multiplier = replica_multiplier_for(change, new.num_stages) if wants_replicas else 1
        resize = merge_replicas if self.world.replica_multiplier > 1 else shrink
        done = resize(change, plan, park=self._policy.parks, replica_multiplier=multiplier)
        if self.world.launch_rank == 0 and done.released_ranks:
            self._finish_at_exit()
            self._policy_runner.release(*ranks.released_and_staying())
        return done

    def _stop_for_restart(self, new: Placement) -> tuple[RepackResult, str]:
        """Save a checkpoint and what to launch from it, and release every rank; also gives a clause for the verdict."""
        began = time.perf_counter()
        launch = save_for_restart(self._stage, self._save_checkpoint, new, self._change.shared_states)
        self.ranks.released = True
        everyone = self.world.launch_ranks(self.world.stages)
        done = RepackResult(released_ranks=everyone, migrate_seconds=time.perf_counter() - began)
        return (
            done,
            f"saved as {launch.tag}, launch {counted(launch.ranks, 'rank')} in {counted(launch.num_stages, 'stage')}",
        )

    def _finish_at_exit(self) -> None:
        """Let rank 0 call :func:`_finish` when its process ends."""
        if self.world.launch_rank == 0 and not self._finishes_at_exit:
            self._finishes_at_exit = True
            atexit.register(_finish, self.ranks, self._policy_runner)


def _finish(ranks: JobRanks, policy_runner: PolicyRunner) -> None:
    """Dismiss parked ranks, which would wait until they lose the store, and finish a release that has begun."""
    try:
        ranks.dismiss()
    finally:
        policy_runner.finish()
