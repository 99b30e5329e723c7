"""Go on with more stages: parked ranks, and ranks that joined, are called and take layers over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ds_dynmo.engine.elastic import parking
from ds_dynmo.engine.elastic.job_ranks import JobRanks
from ds_dynmo.engine.elastic.job_snapshot import JobSnapshot
from ds_dynmo.engine.elastic.parking import Recall
from ds_dynmo.engine.elastic.world_change import RepackResult, WorldChange, empty_stages, fatal_from_here
from ds_dynmo.engine.serialization.objects import from_bytes
from ds_dynmo.errors import MigrationError, PartitionError
from ds_dynmo.plan import MigrationPlan


def grow(change: WorldChange, new: tuple[int, ...], first_seconds: float | None = None) -> RepackResult:
    """Go on with ``new``, over more stages, some of which are called. Called by the ranks at work.

    Args:
        first_seconds: see :class:`JobSnapshot`.

    Raises:
        MigrationError: harmless; a stage has no memory for it, a layer cannot be sent, or a parked rank does not
            answer.
    """
    world, ranks = change.world, change.ranks
    stages = stages_with_parked(ranks, len(new) - 1)
    recalled = tuple(stage for stage in stages if stage not in world.stages)
    old = change.partition_over(stages)
    plan = MigrationPlan.between(old, new, joining=empty_stages(old))
    change.migrator.check_room(plan)
    change.rehearse(plan, stages)
    began = time.perf_counter()
    job = change.describe_job()
    recall = Recall(world.generation + 1, tuple(stages))
    _post(change, recalled, recall)
    with fatal_from_here():
        change.gather_shards()
        change.end()
        ranks.unpark(recalled)
        done = _enlarge(change, recall, JobSnapshot(old, new, ranks.parked, ranks.locations, first_seconds, job))
    whole_seconds = time.perf_counter() - began
    return replace(
        done, recalled_ranks=world.launch_ranks(recalled), world_seconds=whole_seconds - done.migrate_seconds
    )


def rejoin(change: WorldChange, recall: Recall) -> None:
    """Take part in :func:`grow` on a rank that was called."""
    change.engine.released, change.ranks.has_new = False, False
    with fatal_from_here():
        _enlarge(change, recall, None)


def stages_with_parked(ranks: JobRanks, wanted: int) -> list[int]:
    """Choose so many stages of the job: those at work, then parked ones, first those that can be the last stage."""
    if wanted > ranks.most_stages:
        raise PartitionError(f"repack: {wanted} stages, there are 1 to {ranks.most_stages} to go on with")
    world = ranks.world
    missing, last = wanted - len(world.stages), world.last_stage
    parked = sorted(ranks.parked, key=lambda stage: (stage != last, stage < last, stage))
    return world.in_order([*world.stages, *parked[:missing]])


def _post(change: WorldChange, recalled: Sequence[int], recall: Recall) -> None:
    """Call parked ranks, on rank 0; every rank learns whether they answered. Collective."""
    engine, world = change.engine, change.world
    launch_ranks, silent = world.launch_ranks(recalled), []
    if engine.global_rank == 0:
        half = engine.dynmo.timeout_seconds / 2
        silent = parking.post_recall(world.store, launch_ranks, recall, timeout_seconds=half)
    silent = change.comm.broadcast_object(silent)
    if silent:
        change.ranks.unpark([stage for stage in recalled if set(world.launch_ranks([stage])) & set(silent)])
        raise MigrationError(
            f"ranks {silent} (as numbered at the launch) are parked but do not answer, and are given up. "
            "No layer has moved",
            harmless=True,
        )


def _enlarge(change: WorldChange, recall: Recall, snapshot: JobSnapshot | None) -> RepackResult:
    """Begin the larger world and move layers onto the recalled stages; ``snapshot`` is None on a recalled rank."""
    engine, ranks = change.engine, change.ranks
    was_away = snapshot is None
    change.begin(recall.stages, recall.generation)
    snapshot = change.comm.broadcast_object(snapshot)
    assert snapshot is not None
    job = from_bytes(snapshot.job, engine.device)
    if was_away:
        change.restore_job(job)
        ranks.parked, ranks.locations = snapshot.parked, snapshot.locations
    change.context.layers.renumber(snapshot.old, engine.stage_id)
    plan = MigrationPlan.between(snapshot.old, snapshot.new, joining=empty_stages(snapshot.old))
    moved_bytes, migrate_seconds = change.move_layers(plan)
    change.balancer.stages_changed(snapshot.new)
    if snapshot.first_seconds is not None:
        change.balancer.cost_model.first_seconds = snapshot.first_seconds
    change.load_shared_states(job)
    return RepackResult(layers_moved=len(plan.moves), bytes_moved=moved_bytes, migrate_seconds=migrate_seconds)
