"""Put what was read and checked in place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_dynmo.engine.deepspeed import files
from ds_dynmo.engine.deepspeed.loss_scale import set_loss_scale_state
from ds_dynmo.engine.save.context import CheckpointContext, universal_info
from ds_dynmo.engine.save.layer_content import LoadedLayer, install
from ds_dynmo.engine.save.manifest import Manifest
from ds_dynmo.engine.save.progress import restore_random_states
from ds_dynmo.engine.state.pieces import StatePieces
from ds_dynmo.engine.state.scheduler_lists import fill_state


@dataclass(frozen=True)
class LoadOptions:
    """The parts of a checkpoint to load: the flags of DeepSpeed's ``load_checkpoint``."""

    strict: bool
    optimizer: bool
    scheduler: bool
    module_only: bool


@dataclass(frozen=True)
class Loaded:
    """All that this rank needs, read and checked.

    Attributes:
        path: of the file that counters and client state come from.
        layers: by the number of the layer that owns them here.
        optimizer: what the optimizer will hold; None: it is not loaded.
        common: the content of the file at ``path``.
        random: states of this rank's random number generators; None: they are not loaded.
        groups: numbers of the parameter groups that the LR scheduler's lists are of; None: all.
    """

    path: str
    layers: dict[int, LoadedLayer]
    optimizer: StatePieces | None
    common: dict[str, Any]
    random: dict[str, Any] | None
    groups: Sequence[int] | None = None


def apply(context: CheckpointContext, manifest: Manifest, loaded: Loaded, options: LoadOptions) -> None:
    """Put what was read in place, once layers are where it was read for. Collective.

    Raises:
        CheckpointError: on every rank, if any rank fails.
    """
    context.everywhere(lambda: _put_layers(context, loaded, options))
    context.trainable.agree("load_checkpoint")
    context.everywhere(lambda: _put_progress(context, manifest, loaded, options))


def _put_layers(context: CheckpointContext, loaded: Loaded, options: LoadOptions) -> None:
    """Put layers and their optimizer state in place."""
    layers = context.stage.layers
    before = layers.named_parameters()
    for index, module in layers.modules().items():
        install(
            module,
            loaded.layers[index],
            context.origin.layers[layers.first_use(index)],
            context.stage.comm.device,
            strict=options.strict,
            is_shared=context.references.is_shared,
        )
    after = layers.named_parameters()
    if loaded.optimizer is not None:  # otherwise what the optimizer holds is matched with the layers next
        context.stage.optimizer.name_parameters()  # some may be new objects
    context.stage.state.load(before, after, loaded.optimizer)
    if loaded.optimizer is not None:
        set_loss_scale_state(context.engine.optimizer, loaded.optimizer.loss_scale)
    layers.split_uses()  # tied aliases copy their layer's attributes
    context.stage.publish_move()


def _put_progress(context: CheckpointContext, manifest: Manifest, loaded: Loaded, options: LoadOptions) -> None:
    """Put schedulers, counters and random states in place."""
    engine = context.engine
    common = loaded.common
    if not options.module_only:
        if options.scheduler and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(copy.deepcopy(_scheduler_state(context, loaded)))
        files.restore_data_efficiency(engine, common)
        engine.global_steps = common["global_steps"]
        engine.global_samples = common.get("global_samples", engine.global_steps * engine.train_batch_size())
        engine.skipped_steps = common["skipped_steps"]
        if not manifest.stock:
            stays = manifest.placement == context.stage.placement
            context.progress.restore_counters(manifest.state, same_placement=stays)
    files.note_degrees(engine, common, tensor_parallel=not options.module_only)
    if loaded.random is not None:
        restore_random_states(loaded.random)


def _scheduler_state(context: CheckpointContext, loaded: Loaded) -> dict[str, Any]:
    """Return the LR scheduler's state, with present entries for groups that it was saved without."""
    state: dict[str, Any] = loaded.common["lr_scheduler"]
    optimizer = context.stage.optimizer.inner
    if loaded.groups is None or optimizer is None:
        return state
    return fill_state(context.engine.lr_scheduler, state, loaded.groups, len(optimizer.param_groups))


def client_state_of(context: CheckpointContext, loaded: Loaded, options: LoadOptions) -> dict[str, Any]:
    """Return what DeepSpeed would: everything in its file that it does not use itself."""
    used = {"module", "optimizer"}
    if not options.module_only:
        used |= {"skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}
    if options.scheduler:
        used.add("lr_scheduler")
    universal = universal_info(context.engine, context.stage, {})
    used |= {key for key, value in universal.items() if loaded.common.get(key) == value}
    client = copy.deepcopy({key: value for key, value in loaded.common.items() if key not in used})
    if options.optimizer and not options.module_only and context.stage.optimizer.inner is not None:
        client["optimizer"] = context.stage.optimizer.inner.state_dict()
    return client
