"""Load a checkpoint: every rank reads and checks what it needs, the ranks agree, and only then anything changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from deepspeed.utils import logger

from ds_dynmo.config.withdrawn import LOAD_UNIVERSAL, WITHDRAWN
from ds_dynmo.engine.decide.cycle import Reason, Request
from ds_dynmo.engine.deepspeed.files import UNIVERSAL
from ds_dynmo.engine.save import folder as folders
from ds_dynmo.engine.save.applying import Loaded, LoadOptions, apply, client_state_of
from ds_dynmo.engine.save.context import CheckpointContext, local_slice
from ds_dynmo.engine.save.importers.flat import read_flat
from ds_dynmo.engine.save.importers.per_parameter import read_per_parameter
from ds_dynmo.engine.save.importers.stock import (
    at_saved_layout,
    check_masters,
    how_it_is_read,
    stock_manifest,
)
from ds_dynmo.engine.save.importers.wanted import Wanted
from ds_dynmo.engine.save.layer_content import (
    LoadedLayer,
    Shapes,
    check_left_out,
    check_state,
    present_shapes,
    replica_optimizer_state,
    replica_weights,
)
from ds_dynmo.engine.save.listing import checkpoints, whole_checkpoints
from ds_dynmo.engine.save.manifest import (
    MANIFEST,
    Manifest,
    SliceManifest,
    join,
    rank_file,
    stage_file,
)
from ds_dynmo.engine.save.manifest_files import read_all
from ds_dynmo.engine.save.matching import check_common, check_model
from ds_dynmo.engine.save.saved_files import SavedCheckpoint
from ds_dynmo.engine.save.target import target_of, within_memory
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.pieces import FLAT, StatePieces
from ds_dynmo.errors import CheckpointError
from ds_dynmo.files.checkpoints import LEFT_OUT, layer_file
from ds_dynmo.placement import Placement


def load(
    context: CheckpointContext, load_dir: str, tag: str | None, options: LoadOptions, *, newest_whole: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Restore the engine from a checkpoint. Collective.

    Args:
        newest_whole: where the checkpoint cannot be loaded, load that of the others in ``load_dir`` which was written
            last and can be.

    Returns:
        The file that counters and client state came from, and the client state; ``None, None`` if ``tag`` is None and
        there is no ``latest``.

    Raises:
        CheckpointError: on every rank, naming the file, and other checkpoints there that are whole. The engine is as it
            was, unless the message says otherwise.
    """
    tags = _choose(context, load_dir, tag, newest_whole=newest_whole)
    if not tags:
        logger.warning(f"{os.path.join(load_dir, folders.LATEST)}: there is no such file; nothing was loaded")
        return None, None
    manifest, target, loaded = _read_first(context, load_dir, tags, options)
    if target != context.stage.placement:
        context.rebalancer.move_to(target, Request(Reason.CHECKPOINT), clears_pending_decision=False)
    try:
        apply(context, manifest, loaded, options)
    except Exception as error:
        raise CheckpointError(
            f"{os.path.dirname(loaded.path)}: rank {context.here.rank} failed while putting it in place, so "
            f"the engine is neither what it was nor what was saved: {error}"
        ) from error
    allowed = context.rebalancer.nearest_allowed(
        context.stage.placement
    )  # another dynmo.keep_together may have saved it
    if allowed != context.stage.placement:
        context.rebalancer.move_to(allowed, Request(Reason.CHECKPOINT))
    return loaded.path, client_state_of(context, loaded, options)


# -- choose -------------------------------------------------------------------------------------------


def _choose(context: CheckpointContext, load_dir: str, tag: str | None, *, newest_whole: bool) -> list[str]:
    """Return the tags of the checkpoints to try, the same on every rank: the one that is asked for first. Collective.

    Args:
        tag: None: what ``latest`` names, if it is there.
    """

    def choose() -> list[str]:
        if context.here.rank == 0:
            folders.tidy(load_dir)
        asked_for = folders.read_latest(load_dir) if tag is None else str(tag)
        others = checkpoints(load_dir) if newest_whole else []
        first = [] if asked_for is None else [asked_for]
        return [*first, *(other for other in others if other != asked_for)]

    return context.everywhere(choose, same=lambda found: f"{load_dir}: {', '.join(map(repr, found)) or 'no tag'}")


def _read_first(
    context: CheckpointContext, load_dir: str, tags: Sequence[str], options: LoadOptions
) -> tuple[Manifest, Placement, Loaded]:
    """Read the first checkpoint of ``tags`` that can be. Nothing changes. Collective.

    Returns:
        Its manifest, where layers go, and what this rank has read for that.

    Raises:
        CheckpointError: on every rank: the error of the first one.
    """
    errors = []
    for tag in tags:
        try:
            found = _read_tag(context, load_dir, tag, options)
        except CheckpointError as error:
            errors.append(error)
        else:
            if errors and context.here.rank == 0:
                logger.warning(f"{load_dir}: {tag} is loaded, the newest that can be: {errors[0]}")
            return found
    others: list[str] = []
    if len(tags) == 1:
        first = context.here.rank == 0
        context.stage.comm.enter(context.operation)
        others = context.stage.comm.broadcast_object(whole_checkpoints(load_dir, besides=tags[0]) if first else None)
    there = f"; other checkpoints there that are whole: {', '.join(others)}" if others else ""
    raise CheckpointError(f"{errors[0]}{there}") from errors[0]


# -- read ---------------------------------------------------------------------------------------------


def _read_tag(
    context: CheckpointContext, load_dir: str, tag: str, options: LoadOptions
) -> tuple[Manifest, Placement, Loaded]:
    """Read a checkpoint, as :func:`_read_first`."""
    saved = _open(context, load_dir, tag, options)
    manifest = saved.manifest
    target = within_memory(
        context,
        context.stage.comm.everywhere(
            "loading at a saved partition",
            lambda: target_of(context, manifest, options),
            same=context.stage.placement_change_text,
        ),
    )
    present = context.gather_layers(lambda _, module: present_shapes(module))
    how = how_it_is_read(os.path.join(load_dir, tag))
    if manifest.stock and context.here.rank == 0:
        logger.warning(how)
    try:
        loaded = context.everywhere(lambda: _read(context, saved, target, present, options))
        if manifest.frozen_excluded:
            context.everywhere(lambda: _check_left_out(context, saved))
    except CheckpointError as error:
        if not manifest.stock:
            raise
        raise CheckpointError(f"{how}. {error}") from error
    return manifest, target, loaded


def _open(context: CheckpointContext, load_dir: str, tag: str, options: LoadOptions) -> SavedCheckpoint:
    """Open the checkpoint, whose manifest, or else the names of its files, every rank must see alike. Collective.

    Raises:
        CheckpointError: on every rank.
    """

    def manifest() -> tuple[str, str | list[str]]:
        """Return the folder, and the text of its manifest; the names of its files if stock DeepSpeed wrote it."""
        folder = folders.find(load_dir, tag)
        if folder is None:
            raise CheckpointError(f"{os.path.join(load_dir, tag)}: there is no such folder")
        path = os.path.join(folder, MANIFEST)
        if not os.path.isfile(path):
            if os.path.isdir(os.path.dirname(path)):
                raise CheckpointError(f"{path}: there is no such file")
            if os.path.isdir(os.path.join(folder, UNIVERSAL)):
                raise CheckpointError(f"{folder}: a universal checkpoint; {WITHDRAWN[LOAD_UNIVERSAL]}")
            return folder, sorted(name for name in os.listdir(folder) if name.endswith(".pt"))
        with open(path, encoding="utf-8") as file:
            return folder, file.read()

    comm = context.stage.comm
    folder, held = context.everywhere(manifest, same=_content)
    slice_index = context.here.tp_rank
    slices: tuple[SliceManifest, ...] = ()
    if isinstance(held, list):
        mine = local_slice(context, context.origin.slots)
        slices = join(comm.gather_objects((slice_index, context.here.stage, mine)))

    def parse() -> Manifest:
        if isinstance(held, list):
            if comm.worlds_left:
                raise CheckpointError(f"{folder}: was not written by ds_dynmo, and cannot be read after a re-packing")
            return stock_manifest(context, folder, held, slices, options)
        read = read_all(folder, held)
        check_model(context, read, os.path.join(folder, MANIFEST), options)
        return read

    return SavedCheckpoint(folder, context.everywhere(parse), slice_index)


def _content(found: tuple[str, str | list[str]]) -> str:
    """Describe what was read, for ranks to compare."""
    folder, held = found
    if isinstance(held, list):
        return f"{folder} holds {held}"
    return f"{os.path.join(folder, MANIFEST)} is {hashlib.sha256(held.encode()).hexdigest()}"


def _read(
    context: CheckpointContext,
    saved: SavedCheckpoint,
    target: Placement,
    present: dict[int, Shapes],
    options: LoadOptions,
) -> Loaded:
    """Read everything that this rank needs under ``target``. Nothing changes."""
    manifest, stage = saved.manifest, context.here.stage
    same_stages = manifest.num_stages == context.here.num_stages
    same_replicas = manifest.replicas == context.here.replicas
    source = stage if same_stages else 0
    replica = context.here.replica if same_replicas else 0
    path, common = _read_common(context, saved, source, options)
    layers, wanted = _read_layers(context, saved, target, present, replica, options)
    optimizer = None
    if options.optimizer and not options.module_only and context.stage.optimizer.inner is not None:
        optimizer = _read_optimizer(context, saved, wanted, layers, source)
    random = None
    if not manifest.stock and same_stages and same_replicas and not options.module_only:
        random = saved.read_to(context.stage.comm.device, rank_file(stage, replica, saved.slice_index))
    groups = saved.slice.stages[source].trained_groups if manifest.stock else None
    return Loaded(path, layers, optimizer, common, random, groups)


def _check_left_out(context: CheckpointContext, saved: SavedCheckpoint) -> None:
    """Refuse other frozen weights here than were left out of the checkpoint: they stay, wherever their layer goes."""
    layers = context.stage.layers
    for index, module in layers.counted_modules().items():
        beside = saved.open(layer_file(layers.first_use(index), 0, saved.slice_index)).content
        path = saved.slice.weights[layers.first_use(index)]
        state = saved.open(path).content if beside["weights"] is None else beside["weights"]
        left_out = {name: found for name, found in beside[LEFT_OUT].items() if name not in state}
        check_left_out(module, left_out, saved.path(path))


def _read_optimizer(
    context: CheckpointContext,
    saved: SavedCheckpoint,
    parameters: dict[ParamKey, Sequence[int]],
    layers: dict[int, LoadedLayer],
    source: int,
) -> StatePieces:
    """Read what the optimizer held for ``parameters``, those of ``layers``."""
    if saved.manifest.stock:
        saved = at_saved_layout(context, saved)
    stage = context.stage
    adapter, groups = stage.optimizer.adapter, context.stage.optimizer.inner.param_groups
    per_replica = adapter.per_replica_groups if adapter is not None else frozenset[int]()
    replica = context.here.replica
    wanted = Wanted(parameters, source, len(groups), per_replica, replica, context.here.replicas)
    if saved.manifest.optimizer == FLAT:
        pieces = read_flat(saved, wanted)
        if saved.manifest.stock:
            check_masters(saved, {stage.layers.first_use(index): layer for index, layer in layers.items()}, pieces)
        return pieces
    pieces = read_per_parameter(saved, wanted)
    for index, layer in layers.items():
        replica_optimizer_state(stage.layers.first_use(index), layer, pieces)
    return pieces


def _read_common(
    context: CheckpointContext, saved: SavedCheckpoint, source: int, options: LoadOptions
) -> tuple[str, dict[str, Any]]:
    """Read counters, scheduler and client state from the file of the saved stage ``source``; with the file's path."""
    name = stage_file(saved.slice.numbers[source])
    file = saved.open(name)
    common: dict[str, Any] = file.take({key: value for key, value in file.content.items() if key != "optimizer"})
    check_common(context, common, saved.path(name), options)
    return saved.path(name), common


def _read_layers(
    context: CheckpointContext,
    saved: SavedCheckpoint,
    target: Placement,
    present: dict[int, Shapes],
    replica: int,
    options: LoadOptions,
) -> tuple[dict[int, LoadedLayer], dict[ParamKey, Sequence[int]]]:
    """Read and check this stage's layers under ``target``.

    Args:
        replica: the saved replica whose files are read.

    Returns:
        The layers by number, and their parameters as they were saved.
    """
    layers, origins = context.stage.layers, context.origin.layers
    found: dict[int, LoadedLayer] = {}
    wanted: dict[ParamKey, Sequence[int]] = {}
    for index in target.layers_of(context.here.stage):
        first_use = layers.first_use(index)
        if first_use not in origins or not layers.owner(index, target):
            continue
        found[index], path = _read_layer(context, saved, first_use, replica)
        check_state(
            found[index],
            origins[first_use],
            present[first_use],
            strict=options.strict,
            frozen_excluded=saved.manifest.frozen_excluded,
            path=saved.path(path),
        )
        extras, shapes = found[index].extras, origins[first_use].shapes
        if extras is not None:
            shapes = {parameter: about["shape"] for parameter, about in extras["parameters"].items()}
        wanted |= {ParamKey(first_use, name): shape for name, shape in shapes.items()}
    return found, wanted


def _read_layer(
    context: CheckpointContext, saved: SavedCheckpoint, index: int, replica: int
) -> tuple[LoadedLayer, str]:
    """Read the layer that was saved as layer ``index``; with the file of its weights."""
    own = layer_file(index, replica, saved.slice_index)
    extras = None if saved.manifest.stock else saved.read_to(context.stage.comm.device, own)
    path = saved.slice.weights[index]
    if path == own and extras is not None:
        state = extras["weights"]
    elif path == layer_file(index, 0, saved.slice_index):
        file = saved.open(path)
        state = file.take(file.content["weights"])
    else:
        state = saved.read(path)
    return replica_weights(LoadedLayer(state, extras)), path
