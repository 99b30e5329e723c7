"""Choose where layers go before a checkpoint is loaded into them."""

from __future__ import annotations

from deepspeed.utils import logger

from ds_dynmo.engine.save.applying import LoadOptions
from ds_dynmo.engine.save.context import CheckpointContext
from ds_dynmo.engine.save.manifest import Manifest
from ds_dynmo.errors import MigrationError
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan


def target_of(context: CheckpointContext, manifest: Manifest, options: LoadOptions) -> Placement:
    """Choose where layers go before they are loaded.

    It is the saved placement, if all of these hold, else the present one:

    - it has as many stages as this job, and their present shape, or with ``schedule.kind`` "auto" any that trains here;
    - rebalancing is on, or this run continues one whose profile at the start placed the layers for good.
    """
    present, saved = context.stage.placement, manifest.placement
    if saved.num_stages != present.num_stages:
        return present
    if not _may_have_shape(context, saved):
        if context.here.rank == 0:
            logger.info(f"layers stay at {present}, where the checkpoint is loaded: {saved} is another shape")
        return present
    return saved if context.stage.config.enabled or _was_placed(context, manifest, options) else present


def _may_have_shape(context: CheckpointContext, saved: Placement) -> bool:
    """Return whether layers may go to a placement of the shape of ``saved``, on as many stages as this job has."""
    stage = context.stage
    if saved.shape == stage.placement.shape or stage.config.schedule.kind != "auto":
        return saved.shape == stage.placement.shape
    rebalancer = context.rebalancer
    return saved.shape == "chain" or not (
        rebalancer.why_not(saved) or rebalancer.decider.groups.shortage(saved.num_chunks)
    )


def within_memory(context: CheckpointContext, target: Placement) -> Placement:
    """Return ``target``, or the present placement if a move to ``target`` would exceed the memory limit. Collective."""
    present = context.stage.placement
    context.stage.comm.enter(context.operation)
    try:
        context.rebalancer.decider.memory.check(MigrationPlan.between(present, target))
    except MigrationError as error:
        if context.here.rank == 0:
            logger.warning(f"layers stay at {present}, where the checkpoint is loaded: {error}")
        return present
    return target


def _was_placed(context: CheckpointContext, manifest: Manifest, options: LoadOptions) -> bool:
    """Return whether this run continues one whose profile at the start placed the layers for good."""
    goes_on = context.stage.config.initial_partition == "profile" and not manifest.stock and not options.module_only
    return goes_on and bool(manifest.state["controller"]["placed"])
