"""Write the adapters of a checkpoint in peft's format, or merge them with the weights that they change."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models.huggingface.conversions import to_files
from ds_dynmo.models.huggingface.lora import Adapters, is_adapters, plain_name
from ds_dynmo.models.huggingface.lora_config import library
from ds_dynmo.models.huggingface.source import Source

__all__ = ["merged", "write_adapters"]

_PREFIX = "base_model.model."  # peft's, of what is in the model that it wraps
_FILE = "adapter_model.safetensors"

Tensors = Mapping[str, torch.Tensor]


def write_adapters(
    adapters: Adapters, base: str | None, layers: Iterable[tuple[str, Path, Tensors]], folder: Path
) -> None:
    """Write an adapter's folder, the config last.

    Args:
        base: of which model the adapters are, for the config.
        layers: per layer the library's path of its part, the file that its tensors are from, and these by the names in
            that part.

    Raises:
        CheckpointError: tensors are not those of the adapters.
    """
    from safetensors.torch import save_file

    state: dict[str, torch.Tensor] = {}
    for part, path, tensors in layers:
        for name, like in adapters.part(part).state_dict().items():
            if is_adapters(name) or adapters.trainable.get(f"{part}.{name}"):
                _check(tensors.get(name), like, f"{path}: {part}.{name}")
                state[f"{_PREFIX}{part}.{name}"] = tensors[name]
    found = library().get_peft_model_state_dict(
        adapters.model, state_dict=state, adapter_name=adapters.name, save_embedding_layers=False
    )
    lost = [name for name in state if not is_adapters(name) and name not in found]
    if lost:
        raise ConfigError(
            f"{lost[0].removeprefix(_PREFIX)}: trains, and is no part of an adapter: merge=True writes the whole model"
        )
    save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, folder / _FILE)
    config = copy.deepcopy(adapters.lora_config)
    config.inference_mode = True
    config.base_model_name_or_path = base
    config.save_pretrained(folder)


def merged(source: Source, layer: int, path: Path, tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Add a layer's adapters to its weights in fp32, and name them as the library's files do.

    Args:
        source: reads the base where the checkpoint lacks it.
        tensors: of the file ``path``, by the names in the layer's part.
        dtype: of the result.

    Raises:
        CheckpointError: tensors are not those of the layer, or there is no base.
        ConfigError: peft cannot merge such adapters.
    """
    assert source.adapters is not None
    part = source.outline.paths[layer]
    values: dict[str, torch.Tensor] = {}
    base: dict[str, torch.Tensor] = {}
    for name, like in source.adapters.part(part).state_dict().items():
        own = plain_name(name)
        if name not in tensors and own is not None and not is_adapters(name):
            if source.tensors is None:
                raise CheckpointError(f"{path}: lacks {part}.{name}, and a model with fresh weights has no other")
            base = base or source.build_base(layer).state_dict()
            values[name] = base[own]
        else:
            _check(tensors.get(name), like, f"{path}: {part}.{name}")
            values[name] = tensors[name]
    values = {name: value.to(torch.float32, copy=True) for name, value in values.items()}
    try:
        state = source.adapters.merge(part, values)
    except RuntimeError as error:  # such as a bias of an adapter for a layer without one
        raise ConfigError(f"{part}: peft cannot merge its adapters: {error}") from error
    return to_files(source.skeleton, {f"{part}.{name}": value.to(dtype) for name, value in state.items()})


def _check(found: torch.Tensor | None, like: torch.Tensor, name: str) -> None:
    if found is None or found.shape != like.shape:
        has = "is missing" if found is None else f"has shape {list(found.shape)}"
        raise CheckpointError(f"{name} {has}, expected shape {list(like.shape)}")
