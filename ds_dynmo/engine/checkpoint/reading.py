"""``load_checkpoint``: every rank reads and checks what it needs, the ranks agree, and only then anything changes."""

from __future__ import annotations

import copy
import glob
import hashlib
import os
from dataclasses import dataclass
from typing import Any

from deepspeed.utils import logger

from ds_dynmo.engine.checkpoint import folder as folders
from ds_dynmo.engine.checkpoint.layer_content import LoadedLayer, check_state, install
from ds_dynmo.engine.checkpoint.layout import (
    MANIFEST,
    PER_PARAMETER,
    Manifest,
    layer_file,
    rank_file,
    stage_file,
)
from ds_dynmo.engine.checkpoint.optimizer_state import named_parameters, optimizer_state
from ds_dynmo.engine.checkpoint.progress import restore_counters, restore_random_states
from ds_dynmo.engine.checkpoint.safe_load import check_file, safe_load
from ds_dynmo.engine.checkpoint.together import together
from ds_dynmo.errors import CheckpointError


@dataclass(frozen=True)
class What:
    """What to load: the flags of DeepSpeed's ``load_checkpoint``."""

    strict: bool
    optimizer: bool
    scheduler: bool
    module_only: bool


@dataclass(frozen=True)
class Loaded:
    """All that this rank needs, read and checked."""

    path: str
    layers: dict[int, LoadedLayer]  # by the number of the layer that owns them here
    optimizer: Any | None
    common: dict[str, Any]
    random: dict[str, Any] | None


class SavedCheckpoint:
    """The files of a checkpoint. Each is checked against the manifest before it is read."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self._folder = folder
        self.manifest = manifest
        self._read: dict[str, Any] = {}

    def path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def read(self, name: str) -> Any:
        if name not in self._read:
            self._read[name] = safe_load(self._checked(name), mapped=True)
        if name.startswith("mp_rank_") and not isinstance(self._read[name], dict):
            raise CheckpointError(f"{self.path(name)}: is no file of DeepSpeed's")
        return self._read[name]

    def read_to(self, device: Any, name: str) -> Any:
        """Like :meth:`read`, with tensors in memory, on ``device`` if they were on one."""
        return safe_load(self._checked(name), device=device)

    def _checked(self, name: str) -> str:
        if not self.manifest.stock and name not in self.manifest.files:
            raise CheckpointError(f"{self.path(name)}: {MANIFEST} does not list it")
        return check_file(self.path(name), self.manifest.files.get(name))


def load(engine: Any, load_dir: str, tag: str | None, what: What) -> tuple[str | None, dict[str, Any] | None]:
    """Make ``engine`` what it was when the checkpoint was written. Collective.

    Returns:
        The file that counters and client state came from, and the client state; ``None, None`` where ``tag`` is None
        and there is no ``latest``.

    Raises:
        CheckpointError: on every rank, naming the file. The engine is as it was, unless the message says otherwise.
    """
    comm = engine._comm
    comm.enter("load_checkpoint")
    tag = str(tag) if tag is not None else together(comm, lambda: folders.read_latest(load_dir))
    tags = comm.gather_objects(tag)
    if len(set(tags)) > 1:
        raise CheckpointError(f"{load_dir}: the ranks would load different tags: {tags}")
    if tag is None:
        logger.warning(f"{os.path.join(load_dir, folders.LATEST)}: there is no such file; nothing was loaded")
        return None, None
    saved = _open(engine, load_dir, tag, what)
    target = _target(engine, saved.manifest, what)
    loaded = together(comm, lambda: _read(engine, saved, target, what))
    try:
        if list(target) != engine.partition:
            engine._go_to(target, reason="checkpoint")
        _apply(engine, saved.manifest, loaded, what)
    except Exception as error:
        raise CheckpointError(
            f"{saved.path('')}: rank {engine.global_rank} failed while it was put to use, so the "
            f"engine is neither what it was nor what was saved: {error}"
        ) from error
    return loaded.path, _client_state(engine, loaded, what)


# -- read ---------------------------------------------------------------------------------------------


def _open(engine: Any, load_dir: str, tag: str, what: What) -> SavedCheckpoint:
    """The checkpoint and its manifest, which every rank has to see alike."""

    def manifest() -> tuple[str, str | None]:
        folder = folders.find(load_dir, tag)
        if folder is None:
            raise CheckpointError(f"{os.path.join(load_dir, tag)}: there is no such folder")
        path = os.path.join(folder, MANIFEST)
        if not os.path.isfile(path):
            if os.path.isdir(os.path.dirname(path)):
                raise CheckpointError(f"{path}: there is no such file")
            return folder, None
        with open(path, encoding="utf-8") as file:
            return folder, file.read()

    comm = engine._comm
    folder, text = together(comm, manifest)
    digests = comm.gather_objects(hashlib.sha256((text or "").encode()).hexdigest())
    if len(set(digests)) > 1:
        raise CheckpointError(f"{os.path.join(folder, MANIFEST)}: the ranks see different ones")
    layouts = {stage: layout for stage, layout in comm.gather_objects((engine.stage_id, engine._origin.layout))}

    def parse() -> Manifest:
        if text is None:
            return _stock_manifest(engine, folder, tuple(layouts[stage] for stage in sorted(layouts)), what)
        try:
            read = Manifest.from_json(text)
        except ValueError as error:
            raise CheckpointError(f"{os.path.join(folder, MANIFEST)}: cannot be read: {error}") from error
        _check_model(engine, read, os.path.join(folder, MANIFEST), what)
        return read

    return SavedCheckpoint(folder, together(comm, parse))


def _check_model(engine: Any, manifest: Manifest, path: str, what: What) -> None:
    """Was it written by an engine like this one?"""
    num_layers = engine._layers.num_layers
    if manifest.partition[-1] != num_layers:
        raise CheckpointError(f"{path}: a model of {manifest.partition[-1]} layers, expected {num_layers}")
    for index, origin in engine._origin.layers.items():
        found = manifest.shapes.get(index)
        if found is None:
            raise CheckpointError(f"{path}: layer {index} has no parameters there, expected {origin.shapes}")
        differ = {
            name: found.get(name)
            for name in {*found, *origin.shapes}
            if found.get(name) != origin.shapes.get(name) and (what.strict or (name in found and name in origin.shapes))
        }
        if differ:
            expected = {name: origin.shapes.get(name) for name in differ}
            raise CheckpointError(
                f"{path}: layer {index} was built with parameters of shapes {differ}, expected {expected}"
            )
    if what.module_only or not what.optimizer:
        return
    ours = engine.basic_optimizer
    kind = optimizer_state(ours, engine.device).kind
    name = type(ours).__name__ if ours is not None else ""
    if (manifest.optimizer, manifest.optimizer_class) != (kind, name):
        raise CheckpointError(
            f"{path}: optimizer state of {manifest.optimizer_class or 'none'} ({manifest.optimizer}), expected {name or 'none'} ({kind}); "
            "load_optimizer_states=False loads the rest"
        )


def _stock_manifest(engine: Any, folder: str, layouts: tuple[Any, ...], what: What) -> Manifest:
    """What the manifest of a checkpoint would be that stock DeepSpeed wrote of this engine's pipeline."""
    layers, origin = engine._layers, engine._origin
    stages = sorted(
        os.path.basename(path) for path in glob.glob(os.path.join(glob.escape(folder), "mp_rank_*_model_states.pt"))
    )
    expected = [stage_file(stage) for stage in range(engine.num_stages)]
    if what.module_only and stages:
        expected = stages
    if stages != expected:
        raise CheckpointError(
            f"{folder}: written by stock DeepSpeed with the stage files {stages}, expected {expected}: without a "
            f"{MANIFEST} optimizer state loads at the same number of stages only; load_module_only=True loads weights"
        )
    weights = {}
    for index in origin.layers:
        use = layers.stored_use(index)
        weights[index] = layers.file_name(index if use is None else use)
    return Manifest(
        partition=origin.partition,
        replicas=0,
        optimizer=PER_PARAMETER,
        optimizer_class="",
        stages=layouts,
        shapes={index: layer.shapes for index, layer in origin.layers.items()},
        weights=weights,
        frozen_excluded=False,
        files={},
        state={},
    )


def _target(engine: Any, manifest: Manifest, what: What) -> tuple[int, ...]:
    """Where the ranks go before they load: to the saved partition if it is one for them."""
    adopts = manifest.num_stages == engine.num_stages and engine.dynmo.enabled
    if manifest.stock:
        adopts = not what.module_only
    return manifest.partition if adopts else tuple(engine.partition)


def _read(engine: Any, saved: SavedCheckpoint, target: tuple[int, ...], what: What) -> Loaded:
    """Everything that this rank needs under the partition ``target``. Nothing changes."""
    manifest, stage = saved.manifest, engine.stage_id
    layers, origins = engine._layers, engine._origin.layers
    replica = engine.grid.get_data_parallel_id()
    same_ranks = manifest.num_stages == engine.num_stages
    same_replicas = manifest.replicas == engine.grid.get_data_parallel_world_size()
    first = stage_file(stage if same_ranks else 0)
    common = saved.read(first)
    lacking = {"global_steps", "skipped_steps", "dp_world_size", "mp_world_size"} - common.keys()
    if lacking:
        raise CheckpointError(f"{saved.path(first)}: lacks {sorted(lacking)}")
    found, wanted = {}, []
    for index in range(target[stage], target[stage + 1]):
        name = layers.first_use(index)
        if name not in origins or not layers.owner(index, target):
            continue
        extras = None
        if not manifest.stock:
            extras = saved.read_to(engine.device, layer_file(name, replica if same_replicas else 0))
        path = manifest.weights[name]
        state = saved.read(path)
        if path == layer_file(name, 0):
            state = state["weights"]
        found[index] = LoadedLayer(state, extras)
        check_state(
            found[index],
            origins[name],
            strict=what.strict,
            frozen_excluded=manifest.frozen_excluded,
            path=saved.path(path),
        )
        parameters = extras["parameters"] if extras is not None else origins[name].shapes
        wanted += [(name, parameter) for parameter in parameters]
    optimizer = None
    if what.optimizer and not what.module_only:
        kind = optimizer_state(engine.basic_optimizer, engine.device)
        optimizer = kind.read(saved, wanted, stage if same_ranks else 0)
    if what.scheduler and not what.module_only and engine.lr_scheduler is not None:
        if not isinstance(common.get("lr_scheduler"), dict):
            raise CheckpointError(
                f"{saved.path(first)}: holds no LR scheduler, but this engine has one; "
                "load_lr_scheduler_states=False loads the rest"
            )
    random = None
    if not manifest.stock and same_ranks and same_replicas and not what.module_only:
        random = saved.read_to(engine.device, rank_file(stage, replica))
    return Loaded(saved.path(first), found, optimizer, common, random)


# -- apply --------------------------------------------------------------------------------------------


def _apply(engine: Any, manifest: Manifest, loaded: Loaded, what: What) -> None:
    """Put what was read in place. The partition is the one that it was read for."""
    layers = engine._layers
    before = named_parameters(layers)
    for index, module in layers.modules().items():
        install(module, loaded.layers[index], engine._origin.layers[layers.first_use(index)], strict=what.strict)
    after = named_parameters(layers)
    optimizer_state(engine.basic_optimizer, engine.device).restore(before, after, loaded.optimizer)
    layers.split_uses()
    layers.tie(engine.grid, engine._comm.tied_group)
    engine._layers_moved()
    engine._agree_on_trainable("load_checkpoint")
    common = loaded.common
    if not what.module_only:
        if what.scheduler and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(copy.deepcopy(_for_all_groups(engine, common["lr_scheduler"])))
        engine.global_steps = common["global_steps"]
        engine.global_samples = common.get("global_samples", engine.global_steps * engine.train_batch_size())
        engine.skipped_steps = common["skipped_steps"]
        engine.loaded_checkpoint_mp_world_size = common["mp_world_size"]
        if not manifest.stock:
            restore_counters(engine, manifest.state, same_partition=list(manifest.partition) == engine.partition)
    engine.loaded_checkpoint_dp_world_size = common["dp_world_size"]
    if loaded.random is not None:
        restore_random_states(loaded.random)


def _for_all_groups(engine: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state where stock DeepSpeed had dropped a stage's empty groups: their entries stay as they are."""
    groups = engine.basic_optimizer.param_groups if engine.basic_optimizer is not None else []
    present = [number for number, group in enumerate(groups) if group["params"]]
    filled = dict(state)
    for name, value in state.items():
        own = getattr(engine.lr_scheduler, name, None)
        if isinstance(value, list) and isinstance(own, list) and len(value) == len(present) < len(own) == len(groups):
            filled[name] = list(own)
            for number, entry in zip(present, value):
                filled[name][number] = entry
    return filled


def _client_state(engine: Any, loaded: Loaded, what: What) -> dict[str, Any]:
    """What DeepSpeed returns: everything in its file that it did not use itself."""
    used = {"module"}
    if not what.module_only:
        used |= {"skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}
    if what.scheduler:
        used.add("lr_scheduler")
    used.add("optimizer")
    client = copy.deepcopy({key: value for key, value in loaded.common.items() if key not in used})
    if what.optimizer and not what.module_only and engine.basic_optimizer is not None:
        client["optimizer"] = engine.basic_optimizer.state_dict()
    return client
