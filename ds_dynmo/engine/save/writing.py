"""Save a checkpoint: DeepSpeed's files and ds_dynmo's beside them, which all appear at once.

A save has two parts. :func:`begin_save` takes the state of training: every file is written, or copied to memory.
:class:`UnfinishedCheckpoint` writes what is not on the disk yet, checks all files and gives the folder its name. It has
nothing of the engine, so a thread may finish it while training goes on.

Each rank tells what it wrote. Nobody lists the folder to find out: a network file system may list less than is there.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.comm.store_agreement import Agreement
from ds_dynmo.engine.deepspeed import files
from ds_dynmo.engine.save.context import CheckpointContext, local_slice, universal_info
from ds_dynmo.engine.save.destinations import Destination
from ds_dynmo.engine.save.folder import LATEST, CheckpointFolder, sync
from ds_dynmo.engine.save.layer_content import add_per_replica, digests_of_frozen, extras_of
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
from ds_dynmo.files.checkpoints import LEFT_OUT, layer_file


@dataclass(frozen=True)
class SaveOptions:
    """The arguments of ``engine.save_checkpoint``."""

    save_dir: str
    tag: str | None
    client_state: dict[str, Any]
    save_latest: bool
    exclude_frozen_parameters: bool


def begin_save(context: CheckpointContext, options: SaveOptions, destination: Destination) -> UnfinishedCheckpoint:
    """Take the state of training. Collective.

    Raises:
        ConfigError: a tag that cannot name a folder, or a way of writing that is not supported. Nothing was written.
        CheckpointError: on every rank, if a rank could not take its part. Earlier checkpoints are untouched.
    """
    save_dir, exclude_frozen = options.save_dir, options.exclude_frozen_parameters
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    tag = str(options.tag if options.tag is not None else f"global_step{context.stage.counters.steps}")
    _check_supported(context, tag, destination)
    client_state = options.client_state | universal_info(context.engine, context.stage, options.client_state)
    context.everywhere(lambda: os.path.join(save_dir, tag), same=str)
    rank, folder = context.here.rank, CheckpointFolder(save_dir, tag)
    left_out = context.gather_layers(partial(_hash_left_out, context)) if exclude_frozen else None
    with _discarded_on_error(folder, rank, context):
        context.gather(lambda: folder.begin() if rank == 0 else None)
        context.gather(lambda: _take_files(context, folder.temporary, client_state, left_out, destination))
        slices = context.gather(lambda: _slice(context))
    manifest = _manifest(context, slices, exclude_frozen) if rank == 0 else None
    return UnfinishedCheckpoint(
        path=os.path.join(save_dir, tag),
        step=context.stage.counters.steps,
        folder=folder,
        rank=rank,
        destination=destination,
        manifest=manifest,
        save_latest=options.save_latest,
    )


@contextmanager
def _discarded_on_error(folder: CheckpointFolder, rank: int, agreement: Agreement) -> Iterator[None]:
    """Let rank 0 remove the temporary folder if there is an error inside, which is on every rank."""
    try:
        yield
    except CheckpointError:
        with suppress(CheckpointError):  # the next save removes it
            agreement.gather(lambda: folder.discard() if rank == 0 else None)
        raise


def _check_supported(context: CheckpointContext, tag: str, destination: Destination) -> None:
    if os.path.basename(tag) != tag or tag == "" or tag.startswith(".") or tag == LATEST:
        raise ConfigError(
            f"tag = {tag!r}: has to be the name of one folder, without a dot in front, and not {LATEST!r}"
        )
    if (problem := files.cannot_write(context.engine, later=destination.writes_later)) is not None:
        raise ConfigError(problem)


def _take_files(
    context: CheckpointContext,
    folder: str,
    client_state: dict[str, Any],
    left_out: dict[int, dict[str, str]] | None,
    destination: Destination,
) -> None:
    """Let ``destination`` have DeepSpeed's files of this rank, and ds_dynmo's.

    Args:
        left_out: digests of the frozen weights that are not saved, by layer; None: all are saved.
    """
    layers = context.stage.layers
    layers.tied_aliases.refresh(training=context.engine.module.training)
    parent, name = os.path.split(folder)
    engine = context.engine

    def take(content: Any, name: str) -> None:
        destination.take(content, os.path.join(folder, name), torch.save)

    files.write(
        *(engine, parent, name, client_state, destination.take),
        layers=layers.indices,
        exclude_frozen=left_out is not None,
    )
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
        extras = extras if left_out is None else {**extras, LEFT_OUT: left_out[index]}
        take(extras, layer_file(index, replica, slice_index))
    if (of_optimizer := context.stage.state.extra_optimizer_state()) is not None:
        take(of_optimizer, flat_file(context.here.stage, replica, slice_index))
    take(random_states(), rank_file(context.here.stage, replica, slice_index))


def _hash_left_out(context: CheckpointContext, index: int, module: nn.Module) -> dict[str, str]:
    """Hash the frozen weights of a layer that are not saved. Where DeepSpeed writes no file of it, ours has them."""
    return {} if context.stage.layers.stored_use(index) is None else digests_of_frozen(module)


def _slice(context: CheckpointContext) -> tuple[int, int, SliceManifest] | None:
    """Describe the files of this rank's stage; None: another replica does."""
    if context.here.replica:
        return None
    slots = context.stage.state.slots(context.stage.layers.named_parameters())
    return context.here.tp_rank, context.here.stage, local_slice(context, slots)


def _manifest(
    context: CheckpointContext, slices: list[tuple[int, int, SliceManifest] | None], exclude_frozen: bool
) -> Manifest:
    """Make the manifest, but for the files; ``slices``: per rank its slice, its stage, and that stage's manifest."""
    optimizer = context.stage.optimizer.inner
    return Manifest(
        placement=context.stage.layers.placement,
        replicas=context.here.replicas,
        optimizer=context.stage.state.storage,
        optimizer_class=type(optimizer).__name__ if optimizer is not None else "",
        slices=join(found for found in slices if found is not None),
        frozen_excluded=exclude_frozen,
        replicas_differ=context.stage.replicas_differ,
        files={},
        state=copy.deepcopy(context.progress.counters()),
    )


@dataclass(frozen=True)
class UnfinishedCheckpoint:
    """A checkpoint whose state was taken, and which has no name yet.

    Attributes:
        path: the name that its folder will have.
        step: ``global_steps`` of its state.
        rank: this rank's; all ranks finish it together.
        destination: has the files of this rank.
        manifest: on rank 0, without files.
    """

    path: str
    step: int
    folder: CheckpointFolder
    rank: int
    destination: Destination
    manifest: Manifest | None
    save_latest: bool

    def finish(self, agreement: Agreement) -> int:
        """Write the rest, check every file, and give the folder its name. Every rank calls this.

        Returns:
            The bytes of all files on rank 0, 0 on other ranks.

        Raises:
            CheckpointError: on every rank, if a rank could not write, or wrote what could not be loaded again (a class
                in ``client_state``). Earlier checkpoints are untouched.
        """
        with _discarded_on_error(self.folder, self.rank, agreement):
            agreement.gather(self.destination.write_rest)
            found = agreement.gather(self._check_written)
            named = {name: SavedFile(**file) for part in found for name, file in part.items()}
            agreement.gather(lambda: self._commit(named))
        return sum(file.num_bytes for file in named.values())

    def _check_written(self) -> dict[str, dict[str, Any]]:
        """Check that the files of this rank are on the disk and can be loaded; describe each."""
        written = {}
        for path in self.destination.paths:
            sync(path)  # by the rank that wrote: another host has nothing of it in memory
            safe_load(path, mapped=True, checks_values=False)  # they are as in memory still
            written[os.path.relpath(path, self.folder.temporary)] = asdict(describe(path))
        return written

    def _commit(self, named: dict[str, SavedFile]) -> None:
        if self.manifest is None:
            return
        manifest, path = replace(self.manifest, files=named), os.path.join(self.folder.temporary, MANIFEST)
        manifest.check_complete(self.folder.temporary)
        with path_in_errors(path), open(path, "w") as file:
            file.write(manifest.to_json())
        sync(path)
        self.folder.commit(self.save_latest)
