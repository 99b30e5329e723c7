"""Freed ranks as extra data-parallel replicas: how many there can be, and how a job with some changes its stages."""

from __future__ import annotations

import time
from dataclasses import replace

from ds_dynmo.engine.elastic.shrinking import free_stages, plan_shrink
from ds_dynmo.engine.elastic.world_change import RepackResult, WorldChange, empty_stages, fatal_from_here
from ds_dynmo.plan import MigrationPlan


def replica_multiplier_for(change: WorldChange, num_stages: int) -> int:
    """How many times the launch's replicas fit on the ranks at work, over so many stages. Collective.

    Once where half of the stages are not free, a batch cannot be split evenly, or a rank has no data of its own to
    read.
    """
    world = change.world
    micro_batches = change.engine.micro_batches * world.replica_multiplier
    most = len(world.stages) // num_stages
    fitting = [times for times in range(2, most + 1) if micro_batches % times == 0]
    if not fitting or not world.has_replica_axis:
        return 1
    return fitting[-1] if all(change.comm.gather_objects(change.data.can_read)) else 1


def merge_replicas(change: WorldChange, new: tuple[int, ...], *, park: bool, replica_multiplier: int) -> RepackResult:
    """Like :func:`shrink`, where there are extra replicas: onto any number of the stages at work. Collective.

    Raises:
        MigrationError: harmless; a stage has no memory for it, or a layer cannot be sent.
    """
    stages = change.world.in_order(change.world.stages)
    old = change.partition_over(stages)
    takes_all = len(new) == len(old)
    plan = MigrationPlan.between(old, new, joining=empty_stages(old)) if takes_all else plan_shrink(change, old, new)[0]
    change.migrator.check_room(plan)
    change.rehearse(plan, stages, copies=replica_multiplier > 1)
    began = time.perf_counter()
    with fatal_from_here():
        _form_one_pipeline(change, stages, old)
        formed_seconds = time.perf_counter() - began
        if takes_all:
            done = _move_to_all(change, plan)
        else:
            done = free_stages(change, new, park=park, replica_multiplier=replica_multiplier)
    return replace(done, world_seconds=done.world_seconds + formed_seconds)


def _form_one_pipeline(change: WorldChange, stages: list[int], partition: tuple[int, ...]) -> None:
    """Make all ranks at work stages of one pipeline, in which those of the extra replicas are empty. Collective."""
    change.gather_shards()
    change.end()
    change.begin(stages, change.world.generation + 1)
    context = change.context
    context.layers.renumber(partition, context.stage)
    context.state.rebuild_buffers()


def _move_to_all(change: WorldChange, plan: MigrationPlan) -> RepackResult:
    """Move layers onto all stages that there are."""
    moved_bytes, migrate_seconds = change.move_layers(plan)
    change.balancer.stages_changed(plan.new)
    return RepackResult(layers_moved=len(plan.moves), bytes_moved=moved_bytes, migrate_seconds=migrate_seconds)
