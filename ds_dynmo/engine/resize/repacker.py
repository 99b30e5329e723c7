"""Re-packing: continue with fewer ranks. ``engine.repacker`` decides, changes the world and reports."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from typing import Any

from ds_dynmo.engine.decide.cycle import Reason, Request
from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.decide.reporter import Reporter
from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline
from ds_dynmo.engine.move.migrator import Migrator
from ds_dynmo.engine.resize.decision import StageDecision
from ds_dynmo.engine.resize.release import policy_for
from ds_dynmo.engine.resize.release.runner import PolicyRunner
from ds_dynmo.engine.resize.restart import save_for_restart
from ds_dynmo.engine.resize.shrinking import RepackResult, Shrinking
from ds_dynmo.engine.resize.world import World
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import counted
from ds_dynmo.placement import Placement
from ds_dynmo.plan import RepackReport


class Repacker:
    """One rank's part in releasing stages.

    Attributes:
        world: the ranks at work.
        released: whether this rank's accelerator was handed back.

    Args:
        engine: DeepSpeed's engine, which is rebuilt for another world.
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
        world: World,
        *,
        save_checkpoint: Callable[[str, str], Any],
        wait_for_save: Callable[[], None],
    ) -> None:
        self._stage, self._config, self._comm = stage, stage.config, stage.comm
        self._rebalancer, self._reporter = rebalancer, reporter
        self._save_checkpoint, self._wait_for_save = save_checkpoint, wait_for_save
        self.world, self.released = world, False
        self._shrinking = Shrinking(engine, stage, migrator, world, rebalancer.decider.memory.check)
        self._decision = StageDecision(stage, rebalancer)
        policy = policy_for(self._config.repack)
        self._policy_runner = None
        if policy is not None:
            self._policy_runner = PolicyRunner(
                policy,
                reporter.warn,
                reporter.inform,
                have_exited=world.have_exited,
                patience_seconds=self._config.timeout_seconds,
                delay_seconds=self._config.repack.release_delay_seconds,
            )

    def repack(
        self, num_stages: int | None = None, *, partition: Sequence[int] | None = None, train: Callable[[], Any]
    ) -> RepackReport:
        """Continue with fewer ranks. Collective over the ranks at work, between two batches.

        Layers, optimizer state and master weights move as in a rebalance. All replicas release the same stages; the
        first and the last stage keep their ranks as long as there are two. Other ranks are released according to
        ``dynmo.repack.release``; afterwards ``engine.released`` is True on them.

        Args:
            num_stages: the new number of stages; None: the number that ``dynmo.repack`` finds best.
            partition: the new boundaries; None: ``dynmo.balancer`` chooses them, or before the first profile an even
                split of parameters.
            train: trains a batch on the engine's data, if a profile is needed first. Collective.

        Raises:
            PartitionError: more stages than there are, fewer than 1, a partition that cuts a group of
                ``keep_together``, or no partition fits in memory. Nothing has changed.
            MigrationError: see its message; nothing has changed unless it says that layers had begun to move.
        """
        self._rebalancer.collect_profile()
        if self._rebalancer.profile is None and num_stages is None and partition is None:
            self._rebalancer.train_until_profiled(train)
        began = time.perf_counter()
        self._comm.enter("repack")
        new, verdict = self._decision.by_hand(num_stages, partition)
        return self._repack(new, Request(Reason.BY_HAND), verdict, time.perf_counter() - began)

    def repack_if_better(self, request: Request) -> bool:
        """Re-pack if the planner finds fewer stages better; return whether it did. Collective.

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

    def _repack(self, new: Placement, request: Request, verdict: str, decide_seconds: float) -> RepackReport:
        counters, old = self._stage.counters, self._stage.placement
        step = counters.steps
        before, after = self._decision.predicted_seconds(old, new)
        self._reporter.profiled(self._rebalancer.profile, counters.samples)  # the next one is of other stages
        if new.num_stages == old.num_stages:
            moved = self._rebalancer.move_to(new, Request(Reason.EXPLICIT))
            result = RepackResult((), moved.layers_moved, moved.bytes_moved, moved.migrate_seconds)
        else:
            self._wait_for_save()  # its ranks finish it together
            self._comm.everywhere("the callbacks of before_release", self._call_before_release)
            if self._config.repack.checkpoint is not None:
                result, saved = self._stop_for_restart(new)
                verdict = f"{verdict}; {saved}"
            else:
                result = self._shrink(new)
        report = RepackReport(
            step=step,
            reason=str(request),
            old_placement=old,
            new_placement=new,
            released_ranks=result.released_ranks,
            iteration_seconds_before=before,
            iteration_seconds_after=after,
            layers_moved=result.layers_moved,
            bytes_moved=result.bytes_moved,
            decide_seconds=decide_seconds,
            migrate_seconds=result.migrate_seconds,
            world_seconds=result.world_seconds,
            verdict=verdict,
            model_changed=request.reason is Reason.MODEL_CHANGED,
        )
        self._reporter.repacked(report, counters.samples)
        return report

    def _call_before_release(self) -> None:
        for callback in self._stage.before_release:
            callback()

    def _shrink(self, new: Placement) -> RepackResult:
        """Continue with fewer stages, and let rank 0 hand back the accelerators of the others."""
        world = self.world
        result = self._shrinking.shrink(self._decision.plan(new))
        self.released = world.launch_rank in result.released_ranks
        if self._policy_runner is not None:
            if self.released:
                atexit.register(world.announce_exit)
            elif world.launch_rank == 0:
                atexit.register(self._policy_runner.finish)
                self._policy_runner.release(*world.released_and_staying())
        return result

    def _stop_for_restart(self, new: Placement) -> tuple[RepackResult, str]:
        """Save a checkpoint with its launch, and release every rank; also return a clause for the verdict."""
        began = time.perf_counter()

        def save_whole(folder: str, tag: str) -> None:
            self._save_checkpoint(folder, tag)
            self._wait_for_save()

        launch = save_for_restart(self._stage, save_whole, new)
        self.released = True
        result = RepackResult(self.world.launch_ranks, migrate_seconds=time.perf_counter() - began)
        return (
            result,
            f"saved as {launch.tag}, launch {counted(launch.ranks, 'rank')} in {counted(launch.num_stages, 'stage')}",
        )
