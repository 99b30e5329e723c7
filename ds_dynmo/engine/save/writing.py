"""Save a checkpoint: DeepSpeed's files and ds_dynmo's beside them, which all appear at once."""

from __future__ import annotations

import os
from typing import Any

import torch

from ds_dynmo.engine.deepspeed import files
from ds_dynmo.engine.save.context import CheckpointContext, local_slice, universal_info
from ds_dynmo.engine.save.folder import CheckpointFolder, sync
from ds_dynmo.engine.save.layer_content import add_left_out, add_per_replica, extras_of
from ds_dynmo.engine.save.manifest import (
    MANIFEST,
    Manifest,
    SavedFile,
    SliceManifest,
    flat_file,
    join,
    rank_file,
)
from ds_dynmo.engine.save.progress import random_states
from ds_dynmo.engine.save.safe_load import describe, safe_load
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.files import path_in_errors
from ds_dynmo.files.checkpoints import layer_file


def save(
    context: CheckpointContext,
    save_dir: str,
    tag: str | None,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> bool:
    """Write a checkpoint. Collective.

    Raises:
        ConfigError: a tag that cannot name a folder, or a way of writing that is not supported. Nothing was written.
        CheckpointError: on every rank, if a rank could not write, or wrote what could not be loaded again (a class
            in ``client_state``). Earlier checkpoints are untouched.
    """
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    tag = str(tag if tag is not None else f"global_step{context.stage.counters.steps}")
    _check_supported(context, tag)
    client_state = client_state | universal_info(context.engine, context.stage, client_state)
    comm, leads = context.stage.comm, context.here.rank == 0
    comm.enter("save_checkpoint")
    context.everywhere(lambda: os.path.join(save_dir, tag), same=str)
    folder = CheckpointFolder(save_dir, tag)
    try:
        context.everywhere(lambda: folder.begin() if leads else None)
        context.everywhere(lambda: _write_files(context, folder.temporary, client_state, exclude_frozen_parameters))
        place = context.here.tp_rank, context.here.stage
        share = context.everywhere(lambda: (*place, _slice(context), _check_files(context, folder.temporary)))
        every = comm.gather_on_first(share)

        def finish() -> None:
            if leads:
                _finish(folder, _manifest(context, every, exclude_frozen_parameters), save_latest)

        context.everywhere(finish)
    except CheckpointError:
        context.everywhere(lambda: folder.discard() if leads else None)
        raise
    return True


def _check_supported(context: CheckpointContext, tag: str) -> None:
    if os.path.basename(tag) != tag or tag in ("", ".", ".."):
        raise ConfigError(f"tag = {tag!r}: has to be the name of one folder")
    if (problem := files.cannot_write(context.engine)) is not None:
        raise ConfigError(problem)


def _write_files(context: CheckpointContext, folder: str, client_state: dict[str, Any], exclude_frozen: bool) -> None:
    """Write DeepSpeed's files of this rank, and ds_dynmo's."""
    layers = context.stage.layers
    layers.tied_aliases.refresh(training=context.engine.module.training)
    parent, name = os.path.split(folder)
    engine = context.engine
    files.write(engine, parent, name, client_state, exclude_frozen=exclude_frozen)
    replica, slice_index = context.here.replica, context.here.tp_rank
    shared_writing = engine.module.checkpoint_parallel_write_pipeline  # another replica may write a layer's weights
    for index, module in layers.counted_modules().items():
        weights = replica == 0 and layers.stored_use(index) is None
        extras = extras_of(
            module,
            context.origin.layers[index],
            weights=weights,
            all_buffers=replica > 0 or shared_writing,
            is_shared=context.references.is_shared,
        )
        extras = add_per_replica(extras, module, context.stage.state)
        extras = add_left_out(extras, module) if exclude_frozen else extras
        _write(extras, folder, layer_file(index, replica, slice_index))
    if (of_optimizer := context.stage.state.extra_optimizer_state()) is not None:
        _write(of_optimizer, folder, flat_file(context.here.stage, replica, slice_index))
    _write(random_states(), folder, rank_file(context.here.stage, replica, slice_index))


def _write(content: Any, folder: str, name: str) -> None:
    path = os.path.join(folder, name)
    with path_in_errors(path):
        torch.save(content, path)


def _check_files(context: CheckpointContext, folder: str) -> dict[str, SavedFile]:
    """Check that this rank's share of all files is on the disk and can be loaded; describe each."""
    names = sorted(
        os.path.relpath(os.path.join(path, name), folder) for path, _, names in os.walk(folder) for name in names
    )
    found = {}
    for name in names[context.here.rank :: context.here.world_size]:
        path = os.path.join(folder, name)
        sync(path)
        safe_load(path, mapped=True, checks_values=False)  # they are as in memory still
        found[name] = describe(path)
    return found


def _slice(context: CheckpointContext) -> SliceManifest:
    return local_slice(context, context.stage.state.slots(context.stage.layers.named_parameters()))


def _manifest(
    context: CheckpointContext, every: list[tuple[int, int, SliceManifest, dict[str, SavedFile]]], exclude_frozen: bool
) -> Manifest:
    """Make the manifest; ``every``: per rank its slice, its stage, that stage's manifest, and the checked files."""
    optimizer = context.stage.optimizer.inner
    return Manifest(
        placement=context.stage.layers.placement,
        replicas=context.here.replicas,
        optimizer=context.stage.state.storage,
        optimizer_class=type(optimizer).__name__ if optimizer is not None else "",
        slices=join((slice_index, stage, part) for slice_index, stage, part, _ in every),
        frozen_excluded=exclude_frozen,
        replicas_differ=context.stage.replicas_differ,
        ties=context.stage.layers.alike_uses(),
        files={name: file for *_, found in every for name, file in found.items()},
        state=context.progress.counters(),
    )


def _finish(folder: CheckpointFolder, manifest: Manifest, save_latest: bool) -> None:
    path = os.path.join(folder.temporary, MANIFEST)
    with path_in_errors(path), open(path, "w") as file:
        file.write(manifest.to_json())
    sync(path)
    folder.commit(save_latest)
