"""Save a checkpoint: DeepSpeed's files and ds_dynmo's beside them, which all appear at once.

A save has two parts. :func:`begin_save` takes the state of training: every file is written, or copied to memory.
:class:`UnfinishedCheckpoint` writes what is not on the disk yet, checks all files and gives the folder its name. It has
nothing of the engine, so a thread may finish it while training goes on.

The ranks agree a fixed number of times, and send each other nothing: :mod:`ds_dynmo.engine.save.manifest_files`.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.comm.store_agreement import Agreement
from ds_dynmo.engine.deepspeed import files
from ds_dynmo.engine.deepspeed.logs import warning_once
from ds_dynmo.engine.save.context import CheckpointContext, local_slice, universal_info
from ds_dynmo.engine.save.destinations import Destination
from ds_dynmo.engine.save.folder import LATEST, CheckpointFolder, sync
from ds_dynmo.engine.save.layer_content import add_per_replica, digests_of_frozen, extras_of
from ds_dynmo.engine.save.manifest import Manifest, StageManifest, flat_file, rank_file
from ds_dynmo.engine.save.manifest_files import write_all, write_part, write_stage
from ds_dynmo.engine.save.pickled_names import Name, lines_to_allow
from ds_dynmo.engine.save.progress import random_states
from ds_dynmo.engine.save.safe_load import describe, names_to_allow, safe_load
from ds_dynmo.errors import CheckpointError, ConfigError
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
    save_dir = options.save_dir
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    tag = str(options.tag if options.tag is not None else f"global_step{context.stage.counters.steps}")
    _check_supported(context, tag, destination)
    client_state = options.client_state | universal_info(context.engine, context.stage, options.client_state)
    here, folder = context.here, CheckpointFolder(save_dir, tag)
    left_out = _hash_left_out(context) if options.exclude_frozen_parameters else None

    def begin() -> str:
        if here.rank == 0:
            folder.begin()
        return os.path.join(save_dir, tag)

    with _discarded_on_error(folder, here.rank, context):
        path = context.everywhere(begin, same=str)
        part = context.everywhere(lambda: _take(context, folder.temporary, client_state, left_out, destination))
    return UnfinishedCheckpoint(
        path=path,
        step=context.stage.counters.steps,
        folder=folder,
        here=here,
        destination=destination,
        part=part,
        manifest=_manifest(context, options.exclude_frozen_parameters) if here.rank == 0 else None,
        save_latest=options.save_latest,
    )


@contextmanager
def _discarded_on_error(folder: CheckpointFolder, rank: int, agreement: Agreement) -> Iterator[None]:
    """Let rank 0 remove the temporary folder if there is an error inside, which is on every rank."""
    try:
        yield
    except CheckpointError:
        with suppress(CheckpointError):  # the next save removes it
            agreement.everywhere(lambda: folder.discard() if rank == 0 else None)
        raise


def _check_supported(context: CheckpointContext, tag: str, destination: Destination) -> None:
    if os.path.basename(tag) != tag or tag == "" or tag.startswith(".") or tag == LATEST:
        raise ConfigError(
            f"tag = {tag!r}: has to be the name of one folder, without a dot in front, and not {LATEST!r}"
        )
    if (problem := files.cannot_write(context.engine, later=destination.writes_later)) is not None:
        raise ConfigError(problem)


def _take(
    context: CheckpointContext,
    folder: str,
    client_state: dict[str, Any],
    left_out: dict[int, dict[str, str]] | None,
    destination: Destination,
) -> StageManifest:
    """Let ``destination`` have DeepSpeed's files of this rank, and ds_dynmo's; return this rank's part but for them.

    Args:
        left_out: as :func:`_hash_left_out` returns it; None: all weights are saved.
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
        extras = extras if not left_out else {**extras, LEFT_OUT: left_out[index]}
        take(extras, layer_file(index, replica, slice_index))
    if (of_optimizer := context.stage.state.extra_optimizer_state()) is not None:
        take(of_optimizer, flat_file(context.here.stage, replica, slice_index))
    take(random_states(), rank_file(context.here.stage, replica, slice_index))
    if replica:  # the first describes the stage
        return StageManifest((), {})
    return StageManifest((local_slice(context, context.stage.state.slots(layers.named_parameters())),), {})


def _hash_left_out(context: CheckpointContext) -> dict[int, dict[str, str]]:
    """Hash the frozen weights that are not saved, each layer's on one of the replicas that hold it. Collective.

    Returns:
        On the first replica, their digests by layer; an empty dict on others.
    """
    here, layers, p2p = context.here, context.stage.layers, context.stage.comm.p2p
    mine = list(layers.counted_modules().items())[here.replica :: here.replicas]

    def hash_frozen() -> dict[int, dict[str, str]]:
        # where DeepSpeed writes no file of a layer, ours has its frozen weights
        return {index: {} if layers.stored_use(index) is None else digests_of_frozen(module) for index, module in mine}

    hashed = context.everywhere(hash_frozen)
    first, *others = (context.stage.comm.rank_of(here.stage, replica) for replica in range(here.replicas))
    if here.replica:
        p2p.exchange_bytes({first: pickle.dumps(hashed)}, [])
        return {}
    for received in p2p.exchange_bytes({}, others).values():
        hashed.update(pickle.loads(received))
    return hashed


def _manifest(context: CheckpointContext, exclude_frozen: bool) -> Manifest:
    """Make the manifest for all, but for the manifests of stages."""
    optimizer = context.stage.optimizer.inner
    return Manifest(
        placement=context.stage.layers.placement,
        replicas=context.here.replicas,
        optimizer=context.stage.state.storage,
        optimizer_class=type(optimizer).__name__ if optimizer is not None else "",
        frozen_excluded=exclude_frozen,
        state=copy.deepcopy(context.progress.counters()),
        replicas_differ=context.stage.replicas_differ,
    )


@dataclass(frozen=True)
class UnfinishedCheckpoint:
    """A checkpoint whose state was taken, and which has no name yet.

    Attributes:
        path: the name that its folder will have.
        step: ``global_steps`` of its state.
        here: this rank's place; all ranks finish it together.
        destination: has the files of this rank.
        part: this rank's, without files.
        manifest: on rank 0, without the manifests of stages.
    """

    path: str
    step: int
    folder: CheckpointFolder
    here: RankCoordinates
    destination: Destination
    part: StageManifest
    manifest: Manifest | None
    save_latest: bool

    def finish(self, agreement: Agreement) -> int:
        """Write the rest, check every file, and give the folder its name. Every rank calls this.

        Returns:
            The bytes of all files on rank 0, 0 on other ranks.

        Raises:
            CheckpointError: on every rank, if a rank could not write, or wrote what cannot be loaded safely even if the
                user allows it (in ``client_state``). Earlier checkpoints are untouched.
        """
        with _discarded_on_error(self.folder, self.here.rank, agreement):
            agreement.everywhere(self._write_rest)
            agreement.everywhere(self._write_stage)
            return agreement.everywhere(self._commit)

    def _write_rest(self) -> None:
        """Write the files that are not on the disk yet, check that each can be loaded, and tell which they are.

        A class that the user has not allowed is no reason to lose the checkpoint: a warning says how to allow it.
        """
        self.destination.write_rest()
        written, folder, not_allowed = {}, self.folder.temporary, set[Name]()
        for path in self.destination.paths:
            sync(path)  # by the rank that wrote: another host has nothing of it in memory
            if names := names_to_allow(path):
                not_allowed |= names
            else:
                safe_load(path, mapped=True, checks_values=False)  # they are as in memory still
            written[os.path.relpath(path, folder)] = describe(path)
        if not_allowed:
            warning_once(
                "save_checkpoint: the client state, or a layer's, has classes that load_checkpoint refuses until you "
                f"allow them. Run this before it, and before the next save: {lines_to_allow(not_allowed)}"
            )
        write_part(folder, self.here, replace(self.part, files=written))

    def _write_stage(self) -> None:
        if self.here.replica == self.here.tp_rank == 0:
            write_stage(self.folder.temporary, self.here)

    def _commit(self) -> int:
        if self.manifest is None:
            return 0
        whole = write_all(self.folder.temporary, self.manifest)
        self.folder.commit(self.save_latest)
        return sum(file.num_bytes for file in whole.files.values())
