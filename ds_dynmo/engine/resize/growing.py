"""More stages: recall parked ranks, and move layers to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_dynmo.engine.comm.objects import from_bytes
from ds_dynmo.engine.resize import parking
from ds_dynmo.engine.resize.parking import Recall
from ds_dynmo.engine.resize.repack_plan import JobStages, RepackPlan, between
from ds_dynmo.engine.resize.shrinking import move_and_continue
from ds_dynmo.engine.resize.world_change import RepackResult, WorldChange, errors_are_fatal
from ds_dynmo.errors import MigrationError


@dataclass(frozen=True)
class JobSnapshot:
    """The state of the job that rank 0 broadcasts to recalled stages.

    Attributes:
        plan: of the layers' moves.
        before: the stages at work before, and those that stay parked.
        job_bytes: :meth:`WorldChange.describe_job`, for ``from_bytes``.
    """

    plan: RepackPlan
    before: JobStages
    job_bytes: bytes


def grow(change: WorldChange, plan: RepackPlan) -> RepackResult:
    """Recall stages and continue with them. Collective over the ranks at work; recalled ones run :func:`rejoin`.

    Raises:
        MigrationError: harmless; a layer cannot be sent or received, or a parked rank does not answer.
    """
    world, ranks = change.world, change.ranks
    recalled = tuple(stage for stage in plan.stages if stage not in world.launch_stages_at_work)
    change.rehearse(plan)
    began = time.perf_counter()
    job_bytes = change.describe_job()
    recall = Recall(world.generation + 1, plan.stages)
    _post(change, recalled, recall)
    with errors_are_fatal():
        change.gather_shards()
        change.end()
        ranks.unpark(recalled)
        result = _enlarge(change, recall, JobSnapshot(plan, ranks.stages, job_bytes))
    if isinstance(result, MigrationError):
        raise result
    whole_seconds = time.perf_counter() - began
    return replace(
        result, recalled_ranks=world.launch_ranks(recalled), world_seconds=whole_seconds - result.migrate_seconds
    )


def rejoin(change: WorldChange, recall: Recall) -> None:
    """Take part in :func:`grow` on a recalled rank; it is released again if a layer cannot be received."""
    change.ranks.released = False
    with errors_are_fatal():
        _enlarge(change, recall, None)


def _post(change: WorldChange, recalled: Sequence[int], recall: Recall) -> None:
    """Recall parked ranks on rank 0, and broadcast which did not answer. Collective.

    Raises:
        MigrationError: harmless, on every rank; some do not answer and are given up.
    """
    world = change.world
    launch_ranks, unresponsive = world.launch_ranks(recalled), []
    if change.comm.here.rank == 0:
        half = change.stage.config.timeout_seconds / 2
        unresponsive = parking.post_recall(world.store, launch_ranks, recall, timeout_seconds=half)
    unresponsive = change.comm.broadcast_object(unresponsive)
    if unresponsive:
        change.ranks.unpark([stage for stage in recalled if set(world.launch_ranks([stage])) & set(unresponsive)])
        raise MigrationError(
            f"ranks {unresponsive} (as numbered at the launch) are parked but do not answer, and are given up. "
            "No layer has moved",
            harmless=True,
        )


def _enlarge(change: WorldChange, recall: Recall, snapshot: JobSnapshot | None) -> RepackResult | MigrationError:
    """Start the larger world, and move layers to the recalled stages.

    Args:
        snapshot: None on a recalled rank.

    Returns:
        The result, or a harmless error if a rank refused its layers: the recalled stages are parked again. The error is
        returned because :func:`errors_are_fatal` in the caller would make it fatal, and :func:`grow` raises it later.
    """
    ranks = change.ranks
    was_away = snapshot is None
    change.begin(recall.stages, recall.generation)
    snapshot = change.comm.broadcast_object(snapshot)
    assert snapshot is not None
    job = from_bytes(snapshot.job_bytes, change.comm.device)
    if was_away:
        change.restore_job(job)
        ranks.parked = snapshot.before.parked
    plan = snapshot.plan
    change.stage.layers.renumber(plan.migration.old, change.comm.here.stage)
    try:
        moved_bytes, migrate_seconds = change.move_layers(plan.migration)
    except MigrationError as error:
        if not error.harmless:
            raise
        change.load_shared_states(job)
        _shrink_back(change, plan, snapshot.before)
        return MigrationError(f"{error}. The ranks that were called are parked again", harmless=True)
    change.stage.publish_move(stages_changed=True)
    change.load_shared_states(job)
    return RepackResult(
        layers_moved=len(plan.migration.moves), bytes_moved=moved_bytes, migrate_seconds=migrate_seconds
    )


def _shrink_back(change: WorldChange, plan: RepackPlan, before: JobStages) -> None:
    """Return to the previous stages, which still hold their layers. Collective over the larger world."""
    owners = [plan.stages.index(stage) for stage in before.at_work]
    num_stages = len(owners) // before.replica_multiplier
    if before.replica_multiplier > 1:
        change.stage.state.rebuild_buffers()
    present = plan.migration.old.without_empty_stages()
    back = between(plan.stages, plan.migration.old, present, owners[:num_stages])
    move_and_continue(change, back, owners[num_stages:], park=True)
