"""Freed ranks as extra data-parallel replicas: their number, and the re-packing of a job with such replicas."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from ds_dynmo.engine.resize.repack_plan import RepackPlan
from ds_dynmo.engine.resize.shrinking import move_and_continue
from ds_dynmo.engine.resize.world_change import RepackResult, WorldChange, errors_are_fatal


def replica_multiplier_for(change: WorldChange, num_stages: int) -> int:
    """Choose the number of copies of the launch's replicas for pipelines of ``num_stages`` stages. Collective.

    It is 1, without extra replicas, if there are too few stages at work for two copies, a batch cannot be split evenly,
    or a rank cannot read data.
    """
    world = change.world
    micro_batches = change.stage.counters.micro_batches * world.replica_multiplier
    most = len(world.launch_stages_at_work) // num_stages
    fitting = [times for times in range(2, most + 1) if micro_batches % times == 0]
    if not fitting or not world.has_replica_axis:
        return 1
    lacks_data = change.comm.max_over_world(torch.tensor([int(not change.data.can_read)], device="cpu")).item()
    return 1 if lacks_data else fitting[-1]


def merge_replicas(change: WorldChange, plan: RepackPlan, *, park: bool, replica_multiplier: int) -> RepackResult:
    """Merge extra replicas into one pipeline, and continue with any number of the stages at work. Collective.

    Raises:
        MigrationError: harmless; a layer cannot be sent.
    """
    change.rehearse(plan, copies=replica_multiplier > 1)
    began = time.perf_counter()
    with errors_are_fatal():
        _form_one_pipeline(change, plan)
        formed_seconds = time.perf_counter() - began
        if plan.freed:
            result = move_and_continue(change, plan, plan.stages_of_copies(replica_multiplier), park=park)
        else:
            result = _move_to_all(change, plan)
    return replace(result, world_seconds=result.world_seconds + formed_seconds)


def _form_one_pipeline(change: WorldChange, plan: RepackPlan) -> None:
    """Make all ranks at work stages of one pipeline, in which those of the extra replicas are empty. Collective."""
    change.gather_shards()
    change.end()
    change.begin(plan.stages, change.world.generation + 1)
    stage = change.stage
    stage.layers.renumber(plan.migration.old, stage.comm.here.stage)
    stage.state.rebuild_buffers()


def _move_to_all(change: WorldChange, plan: RepackPlan) -> RepackResult:
    """Spread layers over all stages of the pipeline. Collective."""
    moved_bytes, migrate_seconds = change.move_layers(plan.migration)
    change.stage.publish_move(stages_changed=True)
    return RepackResult(
        layers_moved=len(plan.migration.moves), bytes_moved=moved_bytes, migrate_seconds=migrate_seconds
    )
