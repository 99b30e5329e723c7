"""Put what was read and checked in place."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from ds_dynmo.engine.checkpoint.kinds import optimizer_files
from ds_dynmo.engine.checkpoint.layer_content import LoadedLayer, install
from ds_dynmo.engine.checkpoint.layout import Manifest
from ds_dynmo.engine.checkpoint.optimizer_files import named_parameters
from ds_dynmo.engine.checkpoint.progress import restore_counters, restore_random_states
from ds_dynmo.engine.checkpoint.together import together
from ds_dynmo.engine.checkpoint.universal import universal_info
from ds_dynmo.engine.deepspeed_adapter import files


@dataclass(frozen=True)
class LoadOptions:
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


def apply(engine: Any, manifest: Manifest, loaded: Loaded, options: LoadOptions) -> None:
    """Put what was read in place. The partition is the one that it was read for. Collective.

    Raises:
        CheckpointError: on every rank, if any rank fails.
    """
    together(engine._comm, lambda: _put_layers(engine, loaded, options))
    engine._agree_on_trainable("load_checkpoint")
    together(engine._comm, lambda: _put_progress(engine, manifest, loaded, options))


def _put_layers(engine: Any, loaded: Loaded, options: LoadOptions) -> None:
    """The layers, and the optimizer's state for them."""
    layers = engine._layers
    before = named_parameters(layers)
    for index, module in layers.modules().items():
        install(
            module,
            loaded.layers[index],
            engine._origin.layers[layers.first_use(index)],
            strict=options.strict,
            is_shared=engine._names.is_shared,
        )
    after = named_parameters(layers)
    optimizer_files(engine).restore(before, after, loaded.optimizer)
    layers.split_uses()  # tied aliases copy what their layer keeps
    engine._layers_moved()


def _put_progress(engine: Any, manifest: Manifest, loaded: Loaded, options: LoadOptions) -> None:
    """Schedulers, counters and random states."""
    common = loaded.common
    if not options.module_only:
        if options.scheduler and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(copy.deepcopy(_for_all_groups(engine, common["lr_scheduler"])))
        files.restore_data_efficiency(engine, common)
        engine.global_steps = common["global_steps"]
        engine.global_samples = common.get("global_samples", engine.global_steps * engine.train_batch_size())
        engine.skipped_steps = common["skipped_steps"]
        if not manifest.stock:
            restore_counters(engine, manifest.state, same_partition=list(manifest.partition) == engine.partition)
    files.note_degrees(engine, common, tensor_parallel=not options.module_only)
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


def client_state_of(engine: Any, loaded: Loaded, options: LoadOptions) -> dict[str, Any]:
    """What DeepSpeed returns: everything in its file that it did not use itself."""
    used = {"module"}
    if not options.module_only:
        used |= {"skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}
    if options.scheduler:
        used.add("lr_scheduler")
    used.add("optimizer")
    used |= {key for key, value in universal_info(engine).items() if loaded.common.get(key) == value}
    client = copy.deepcopy({key: value for key, value in loaded.common.items() if key not in used})
    if options.optimizer and not options.module_only and engine.basic_optimizer is not None:
        client["optimizer"] = engine.basic_optimizer.state_dict()
    return client
