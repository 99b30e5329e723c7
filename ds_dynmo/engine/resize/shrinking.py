"""Fewer stages: layers leave the others, and the ranks that stay form a new world.

Before layers move nothing has changed, and a failure is harmless. From then on a failure is fatal, and its message says
so: :func:`_errors_are_fatal`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.comm.bounded import call_within_seconds
from ds_dynmo.engine.deepspeed import process_groups
from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline
from ds_dynmo.engine.move.migrator import Migrator, MoveCheck
from ds_dynmo.engine.resize.repack_plan import RepackPlan
from ds_dynmo.engine.resize.world import World
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import MigrationError, RankLostError


@dataclass(frozen=True)
class RepackResult:
    """The result of a re-packing; ranks are those of the launch, seconds are of this rank."""

    released_ranks: tuple[int, ...] = ()
    layers_moved: int = 0
    bytes_moved: int = 0
    migrate_seconds: float = 0.0
    world_seconds: float = 0.0


class Shrinking:
    """One rank's part in continuing with fewer stages.

    Args:
        engine: DeepSpeed's engine, which is rebuilt for another world.
        check: refuses plans for which a rank lacks memory.
    """

    def __init__(
        self, engine: DeepSpeedPipeline, stage: StageContext, migrator: Migrator, world: World, check: MoveCheck
    ) -> None:
        self._engine, self._stage, self._migrator, self._world, self._check = engine, stage, migrator, world, check

    def shrink(self, plan: RepackPlan) -> RepackResult:
        """Move layers to the stages that stay, and continue there; free the others. Collective.

        Raises:
            MigrationError: harmless, if the plan is refused, or a layer cannot be sent.
        """
        stage, world, began = self._stage, self._world, time.perf_counter()
        stays = stage.comm.here.stage in plan.staying
        leaving = world.ranks_of(plan.migration.leaving)
        bytes_moved = self._migrator.migrate(plan.migration, self._check)
        moved = time.perf_counter()
        with _errors_are_fatal():
            world.end()
            if stays:
                self._continue_on(plan.staying)
                stage.layers.renumber(plan.placement, stage.comm.here.stage)
                stage.chunks.loss_stage = plan.placement.owners[-1]
                stage.layers.tie(stage.comm.grid, stage.comm.groups.tied)
                stage.publish_move(stages_changed=True)
            else:
                self._release()
        return RepackResult(
            released_ranks=leaving,
            layers_moved=len(plan.migration.moves),
            bytes_moved=bytes_moved,
            migrate_seconds=moved - began,
            world_seconds=time.perf_counter() - moved,
        )

    def _continue_on(self, stages: Sequence[int]) -> None:
        """Start the next world, and rebuild groups and buffers. Collective over it."""
        engine, stage, world = self._engine, self._stage, self._world

        def begin() -> None:
            topology, group = world.begin(stages)
            process_groups.refit(engine, topology, world_group=group, rank=world.rank)

        call_within_seconds(stage.config.timeout_seconds + world.group_timeout_seconds, begin)
        stage.forms.forget()
        stage.chunks.loss_stage = None
        stage.comm.connect("repack")
        stage.state.use_grid()

    def _release(self) -> None:
        """Free what the engine holds besides the layers, which have left; the rank leaves the training."""
        gc.collect()  # attributes that DeepSpeed sets on parameters form reference cycles
        get_accelerator().empty_cache()


@contextmanager
def _errors_are_fatal() -> Iterator[None]:
    """Make every error fatal, harmless ones too, because the last steps cannot be undone."""
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        raise MigrationError(
            f"the re-packing failed after layers had begun to move or the ranks had parted: {error}. Resume the job "
            "from its last checkpoint, with as many stages as are left"
        ) from error
