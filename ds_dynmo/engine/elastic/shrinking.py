"""Go on with fewer stages: layers leave the others, which are released or become further replicas."""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence

from ds_dynmo.engine.elastic import parking
from ds_dynmo.engine.elastic.copying import copy_stage
from ds_dynmo.engine.elastic.world_change import RepackResult, WorldChange, empty_stages, fatal_from_here
from ds_dynmo.engine.serialization.objects import from_bytes
from ds_dynmo.partitioners import hosts, with_empty
from ds_dynmo.plan import MigrationPlan


def shrink(change: WorldChange, new: tuple[int, ...], *, park: bool, replica_multiplier: int = 1) -> RepackResult:
    """Go on with ``new``, over fewer stages, where there are no extra replicas. Collective.

    Args:
        park: released ranks wait to be called back.
        replica_multiplier: so many times the launch's replicas go on, on stages that are freed.

    Raises:
        MigrationError: harmless; a stage has no memory for it, or a layer cannot be sent.
    """
    plan, _ = plan_shrink(change, change.engine.partition, new)
    change.migrator.check_room(plan)
    if replica_multiplier > 1:
        change.rehearse(plan, change.world.stages, copies=True)
    return free_stages(change, new, park=park, replica_multiplier=replica_multiplier)


def plan_shrink(change: WorldChange, old: Sequence[int], new: tuple[int, ...]) -> tuple[MigrationPlan, tuple[int, ...]]:
    """Plan the moves from ``old`` to ``new``, over fewer stages; with the stages that go on, those that move least."""
    profile = change.balancer.profile
    sizes = [cost.static_bytes for cost in profile.layers] if profile else [1] * old[-1]
    staying = hosts(old, new, sizes)
    num_stages = len(old) - 1
    leaving = [stage for stage in range(num_stages) if stage not in staying]
    target = with_empty(new, staying, num_stages)
    return MigrationPlan.between(old, target, leaving=leaving, joining=empty_stages(old)), staying


def free_stages(change: WorldChange, new: tuple[int, ...], *, park: bool, replica_multiplier: int) -> RepackResult:
    """Move layers off the stages that leave, and begin a world without these, or with them as extra replicas."""
    engine, world = change.engine, change.world
    plan, staying = plan_shrink(change, engine.partition, new)
    leaving = sorted(plan.leaving)
    copying = leaving[: (replica_multiplier - 1) * len(staying)]
    released = tuple(world.stages[stage] for stage in leaving if stage not in copying)
    at_work = [world.stages[stage] for stage in (*staying, *copying)]
    stays, copies = engine.stage_id in staying, engine.stage_id in copying
    began = time.perf_counter()
    job = change.describe_job()
    moved_bytes, _ = change.move_layers(plan)
    moved = time.perf_counter()
    with fatal_from_here():
        change.end()
        if park:
            change.ranks.park(released)
        if stays or copies:
            change.begin(at_work, world.generation + 1, replica_multiplier)
            _settle(change, new, has_layers=stays, replica_multiplier=replica_multiplier)
            if change.shared_states:
                change.load_shared_states(from_bytes(change.comm.broadcast_object(job), engine.device))
        else:
            change.release_stage()
            if not park:
                atexit.register(parking.announce_exit, world.store, world.launch_rank)
    return RepackResult(
        released_ranks=world.launch_ranks(released),
        layers_moved=len(plan.moves),
        bytes_moved=moved_bytes,
        migrate_seconds=moved - began,
        world_seconds=time.perf_counter() - moved,
    )


def _settle(change: WorldChange, new: tuple[int, ...], *, has_layers: bool, replica_multiplier: int) -> None:
    """Number the stages of the smaller world, and fill extra replicas. Collective."""
    context = change.context
    if has_layers:
        context.layers.renumber(new, context.stage)
    else:
        context.state.forget()
    if replica_multiplier > 1:
        with change.naming_dead_ranks():
            copy_stage(context, new, change.world.launch_replicas)
    else:
        context.layers.tie(context.grid, context.comm.tied_group)
    change.balancer.stages_changed(new)
