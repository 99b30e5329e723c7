"""DeepSpeed's files of a checkpoint: write them, and restore what only DeepSpeed knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed.checkpoint.constants import (
    PARAM_SHAPES,
    PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ds_dynmo.errors import ConfigError

__all__ = [
    "PICKLED",
    "UNIVERSAL",
    "ZeroStageEnum",
    "cannot_write",
    "names_of_groups",
    "note_degrees",
    "restore_data_efficiency",
    "slice_number",
    "universal_information",
    "write",
    "writes_optimizer_shards",
]

Take = Callable[[Any, str, Callable[[Any, str], Any]], None]
UNIVERSAL = "zero"  # the folder of a universal checkpoint that has a folder per parameter
PICKLED = (
    DynamicLossScaler,
    LossScaler,
    SubparamShape,
    ZeroStageEnum,
    fragment_address,
)  # classes of objects in DeepSpeed's files


def slice_number(engine: Any) -> int:
    """Return the number of this rank's tensor-parallel slice in the names of DeepSpeed's files."""
    return int(engine.grid.get_model_parallel_rank()) if engine.mp_world_size > 1 else 0


def writes_optimizer_shards(engine: Any) -> bool:
    """Return whether this rank writes a file for its shard of the optimizer's state."""
    return bool(engine.save_zero_checkpoint)


def names_of_groups(stage: Mapping[str, Any]) -> list[list[str]] | None:
    """Read the names of the parameters of each group of a saved stage that has some, in the order of its flat buffer.

    Args:
        stage: the content of its file.

    Returns:
        None: the file does not say, as without ZeRO.
    """
    shapes = stage.get(PARAM_SHAPES)
    return [list(names) for names in shapes if names] if isinstance(shapes, list) else None


def cannot_write(engine: Any, *, later: bool) -> str | None:
    """Find the setting by which a checkpoint may be incomplete after it was written; None if there is none.

    Args:
        later: whether files are copied, and written after DeepSpeed's writer was called.
    """
    if engine.use_node_local_storage():
        return (
            "checkpoint.use_node_local_storage = true: where layers move, another node than the one that wrote a "
            "layer reads it; write to storage that all nodes share"
        )
    if engine.checkpoint_engine.is_decoupled():
        return "a checkpoint writer that goes on after save_checkpoint returned is not supported with dynmo"
    if later and type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        return (
            f'dynmo.checkpoint = "background" writes files as torch.save does, not by {engine.checkpoint_engine}: '
            "remove checkpoint.writer from the configuration"
        )
    return None


def write(
    engine: Any,
    folder: str,
    tag: str,
    client_state: Mapping[str, Any],
    take: Take,
    *,
    layers: Sequence[int],
    exclude_frozen: bool,
) -> None:
    """Write DeepSpeed's files of this rank.

    Args:
        layers: of this stage.
        take: is given the content of each file, its path, and DeepSpeed's function that writes it.
    """
    shards, state = writes_optimizer_shards(engine), dict(client_state)
    if shards and not engine.zero_optimization():  # DeepSpeed leaves them out, and its converter needs them
        state[PARAM_SHAPES] = engine._get_zero_param_shapes()
    with _files_to(take, engine.checkpoint_engine), _files_named(engine.module, layers):
        engine._save_checkpoint(folder, tag, client_state=state, exclude_frozen_parameters=exclude_frozen)
        if shards:
            engine._save_zero_checkpoint(folder, tag)


@contextmanager
def _files_to(take: Take, checkpoint_engine: Any) -> Iterator[None]:
    """Let ``take`` have the files that DeepSpeed's writer is to write."""

    def save(state_dict: Any, path: str) -> bool:
        take(state_dict, path, write_file)
        return True

    write_file = checkpoint_engine.save
    checkpoint_engine.save = save
    try:
        yield
    finally:
        checkpoint_engine.save = write_file


@contextmanager
def _files_named(module: Any, layers: Sequence[int]) -> Iterator[None]:
    """Let a PipelineModule name the file of each of its layers by the layer's number: it counts on from its first."""
    path, is_own = module.ckpt_layer_path, "ckpt_layer_path" in vars(module)
    module.ckpt_layer_path = lambda folder, place: path(folder, layers[place] - module._local_start)
    try:
        yield
    finally:
        del module.ckpt_layer_path
        if is_own:
            module.ckpt_layer_path = path


def restore_data_efficiency(engine: Any, common: Mapping[str, Any]) -> None:
    """Restore the states of DeepSpeed's data efficiency library from its file for all layers."""
    if engine.random_ltd_enabled() and "random_ltd" in common:
        engine.random_ltd_scheduler.load_state_dict(common["random_ltd"])
    if engine.curriculum_learning_enabled() and engine.training_dataloader is not None and "data_sampler" in common:
        engine.training_dataloader.data_sampler.load_state_dict(common["data_sampler"])


def note_degrees(engine: Any, common: Mapping[str, Any], *, tensor_parallel: bool) -> None:
    """Set the degrees of parallelism that a checkpoint was written with, as DeepSpeed does."""
    if tensor_parallel:
        engine.loaded_checkpoint_mp_world_size = common["mp_world_size"]
    engine.loaded_checkpoint_dp_world_size = common["dp_world_size"]


def universal_information(engine: Any, client_state: Mapping[str, Any], replicated: list[str]) -> dict[str, Any]:
    """Make the client state that DeepSpeed's conversion to a universal checkpoint reads.

    How tensor-parallel slices belong together only the user knows, and says as for DeepSpeed: in ``client_state`` or in
    an attribute of the module.

    Args:
        replicated: patterns of the names of parameters that may be on several stages.

    Raises:
        ConfigError: what the user gave is no dict.
    """
    key, patterns = UNIVERSAL_CHECKPOINT_INFO, PIPELINE_REPLICATED_PARAMETER_PATTERNS
    given = client_state.get(key, getattr(engine.module, key, None))
    if given is None:
        given = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key} = {given!r}: has to be a dict of patterns, as ds_to_universal expects it")
    return {key: {**given, patterns: sorted({*given.get(patterns, ()), *replicated})}}
