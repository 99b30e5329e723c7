"""The steps of every change of the number of stages: end a world, start the next, and move layers.

Before a world ends or layers move, nothing has changed, and a failure is harmless. From then on a failure is fatal, and
its message says so: :func:`errors_are_fatal`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.comm.bounded import call_within_seconds
from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.deepspeed import buffers, process_groups
from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline
from ds_dynmo.engine.move.migration_context import MigrationContext
from ds_dynmo.engine.move.migrator import Migrator
from ds_dynmo.engine.resize import job_state
from ds_dynmo.engine.resize.data_position import DataPosition
from ds_dynmo.engine.resize.job_ranks import JobRanks
from ds_dynmo.engine.resize.job_state import Stateful
from ds_dynmo.engine.resize.repack_plan import RepackPlan
from ds_dynmo.engine.resize.world import World
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import MigrationError
from ds_dynmo.plan import MigrationPlan


@dataclass(frozen=True)
class RepackResult:
    """The result of a re-packing; ranks are those of the launch, seconds are of this rank."""

    released_ranks: tuple[int, ...] = ()
    recalled_ranks: tuple[int, ...] = ()
    layers_moved: int = 0
    bytes_moved: int = 0
    migrate_seconds: float = 0.0
    world_seconds: float = 0.0


class WorldChange:
    """One rank's part in a change of the world.

    Attributes:
        stage: of this rank.
        engine: DeepSpeed's engine.
        ranks: of the job.
        data: this rank's position in its data.
        shared_states: by name, the states that a recalled rank loads; see ``engine.share_state``.

    Args:
        progress: counters that are the same on every rank of the job.
    """

    def __init__(
        self,
        engine: DeepSpeedPipeline,
        stage: StageContext,
        rebalancer: Rebalancer,
        migrator: Migrator,
        ranks: JobRanks,
        data: DataPosition,
        progress: Stateful,
    ) -> None:
        self.engine, self.stage, self.comm = engine, stage, stage.comm
        self.rebalancer, self.ranks, self.data = rebalancer, ranks, data
        self._migrator, self._progress = migrator, progress
        self.shared_states: dict[str, Stateful] = {}

    @property
    def world(self) -> World:
        """This rank's present or last world."""
        return self.ranks.world

    @property
    def context(self) -> MigrationContext:
        """This rank's present stage."""
        return self._migrator.make_context()

    # -- layers ---------------------------------------------------------------------------------------

    def move_layers(self, plan: MigrationPlan) -> tuple[int, float]:
        """Carry out ``plan`` in the present world; return the bytes moved and the seconds. Collective."""
        began = time.perf_counter()
        with self.naming_unresponsive_ranks():
            moved_bytes = self._migrator.migrate(plan)
        return moved_bytes, time.perf_counter() - began

    def rehearse(self, plan: RepackPlan, *, copies: bool = False) -> None:
        """Refuse layers that cannot be sent, before the present world ends. Collective.

        Args:
            copies: whether layers that stay are copied to other ranks too.

        Raises:
            MigrationError: harmless, on every rank.
        """
        stage = plan.stages.index(self.world.launch_stage)
        self._migrator.rehearse(plan.migration, stage=stage, copies=copies)

    def empty_stage(self) -> None:
        """Free this rank's layers and optimizer state; the rank stays in the job."""
        self.stage.layers.clear(self.context.references.free_memory)
        self.stage.state.drop_parameters()

    def release_stage(self) -> None:
        """Free this rank's part of the model; the rank leaves the training."""
        engine = self.engine
        self.stage.state.free_all()
        buffers.free_buffers(engine)
        buffers.free_losses(engine)
        self.rebalancer.forget_profile()
        self.ranks.released = True
        gc.collect()  # attributes that DeepSpeed sets on parameters form reference cycles
        get_accelerator().empty_cache()

    def gather_shards(self) -> None:
        """Gather all state on the launch's replicas, and empty the extra ones."""
        world = self.world
        if world.replica_multiplier == 1:
            return
        with self.naming_unresponsive_ranks():
            self.stage.state.gather_shards(self.stage.placement, world.launch_replicas)
        if world.copy_index:
            self.empty_stage()

    # -- worlds ---------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the present world. Collective."""
        self.comm.wait_for_posted_broadcast()
        self.comm.all_done()
        self.world.end()

    def begin(self, stages: Sequence[int], generation: int, replica_multiplier: int = 1) -> None:
        """Start a world of ``stages`` of the job, and rebuild groups and buffers. Collective over the new world."""
        engine = self.engine
        timeout_seconds = self.stage.config.timeout_seconds

        def begin() -> None:
            topology, group = self.world.begin(
                stages, generation, timeout_seconds=timeout_seconds, replica_multiplier=replica_multiplier
            )
            process_groups.refit(engine, topology, world_group=group, rank=self.world.rank)

        call_within_seconds(timeout_seconds + self.world.timeout_seconds, begin)
        buffers.free_buffers(engine)
        self.comm.connect("repack")
        self.stage.state.use_grid()
        self._split_batch()

    def _split_batch(self) -> None:
        """Split each replica's batch, whose size stays the same, between its copies."""
        engine, world = self.engine, self.world
        if world.replica_multiplier == self.data.replica_multiplier:
            return
        self.data.replica_multiplier, self.data.copy_index = world.replica_multiplier, world.copy_index
        engine.set_train_batch_size(engine.train_batch_size())
        self.stage.optimizer.accumulate(engine.micro_batches)

    # -- the state of the job -------------------------------------------------------------------

    def describe_job(self) -> bytes:
        """Pickle the state of the job for recalled ranks, on rank 0. Collective; see :mod:`job_state`."""
        return job_state.describe_job(self.engine, self.comm, self.data, self._progress, self.shared_states)

    def restore_job(self, job: Mapping[str, Any]) -> None:
        """Load :meth:`describe_job` on a recalled rank."""
        job_state.restore_job(self.engine, self.data, self._progress, job)

    def load_shared_states(self, job: Mapping[str, Any]) -> None:
        """Load the shared states of :meth:`describe_job`, on every rank."""
        job_state.load_states(job, self.shared_states)

    @contextmanager
    def naming_unresponsive_ranks(self) -> Iterator[None]:
        """Add the ranks that do not answer to a fatal error while layers or state travel."""
        try:
            yield
        except Exception as error:
            if isinstance(error, MigrationError) and error.harmless:
                raise
            # A rank that is alive may notice only at the end of its time-out.
            unresponsive = self.world.unresponsive_ranks(1.5 * self.stage.config.timeout_seconds)
            if not unresponsive:
                raise
            raise MigrationError(
                f"ranks {unresponsive} (as numbered at the launch) do not answer any more: {error}"
            ) from error


@contextmanager
def errors_are_fatal() -> Iterator[None]:
    """Make every error fatal, harmless ones too, because the last steps cannot be undone."""
    try:
        yield
    except Exception as error:
        raise MigrationError(
            f"the re-packing failed after layers had begun to move or the ranks had parted: {error}. Resume the job "
            "from its last checkpoint, with as many stages as are left"
        ) from error
