"""Fewer stages: layers leave the others, which are released or become extra replicas."""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence

from ds_dynmo.engine.comm.objects import from_bytes
from ds_dynmo.engine.resize import parking
from ds_dynmo.engine.resize.copying import copy_stage
from ds_dynmo.engine.resize.repack_plan import RepackPlan
from ds_dynmo.engine.resize.world_change import RepackResult, WorldChange, errors_are_fatal
from ds_dynmo.placement import Placement


def shrink(change: WorldChange, plan: RepackPlan, *, park: bool, replica_multiplier: int = 1) -> RepackResult:
    """Continue with fewer stages, if there are no extra replicas. Collective.

    Args:
        park: whether released ranks wait for a recall.
        replica_multiplier: new number of replicas over that of the launch; extra ones use freed stages.

    Raises:
        MigrationError: harmless; a layer cannot be sent.
    """
    if replica_multiplier > 1:
        change.rehearse(plan, copies=True)
    return move_and_continue(change, plan, plan.stages_of_copies(replica_multiplier), park=park)


def move_and_continue(
    change: WorldChange, plan: RepackPlan, replica_stages: Sequence[int], *, park: bool
) -> RepackResult:
    """Move layers to the stages that stay, and start a world of these and of the extra replicas. Collective.

    Args:
        plan: between the stages of the present world.
        replica_stages: freed stages, by index, that become extra replicas, in the order of those that stay.
        park: whether the other stages wait for a recall.
    """
    here, world = change.comm.here, change.world
    released = tuple(plan.stages[index] for index in plan.freed if index not in replica_stages)
    at_work = tuple(plan.stages[index] for index in (*plan.staying, *replica_stages))
    replica_multiplier = len(at_work) // len(plan.staying)
    stays, becomes_replica = here.stage in plan.staying, here.stage in replica_stages
    began = time.perf_counter()
    job_bytes = change.describe_job()
    moved_bytes, _ = change.move_layers(plan.migration)
    moved = time.perf_counter()
    with errors_are_fatal():
        change.end()
        if park:
            change.ranks.park(released)
        if stays or becomes_replica:
            change.begin(at_work, world.generation + 1, replica_multiplier)
            _fill_new_world(change, plan.placement, has_layers=stays, replica_multiplier=replica_multiplier)
            if change.shared_states:
                change.load_shared_states(from_bytes(change.comm.broadcast_object(job_bytes), change.comm.device))
        else:
            change.release_stage()
            if not park:
                atexit.register(parking.announce_exit, world.store, world.launch_rank)
    return RepackResult(
        released_ranks=world.launch_ranks(released),
        layers_moved=len(plan.migration.moves),
        bytes_moved=moved_bytes,
        migrate_seconds=moved - began,
        world_seconds=time.perf_counter() - moved,
    )


def _fill_new_world(change: WorldChange, placement: Placement, *, has_layers: bool, replica_multiplier: int) -> None:
    """Number the stages of the smaller world, and fill extra replicas. Collective."""
    stage = change.stage
    if has_layers:
        stage.layers.renumber(placement, stage.comm.here.stage)
    else:
        stage.state.free_all()
    if replica_multiplier > 1:
        with change.naming_unresponsive_ranks():
            copy_stage(change.context, placement, change.world.launch_replicas)
    else:
        stage.layers.tie(stage.comm.grid, stage.comm.tied_group)
    change.stage.publish_move(stages_changed=True)
