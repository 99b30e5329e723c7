"""Write the adapters of a checkpoint in peft's format, or merge them with the weights that they change."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.files.checkpoints import LEFT_OUT
from ds_dynmo.files.digests import digest
from ds_dynmo.models.huggingface.conversions import to_files
from ds_dynmo.models.huggingface.lora import Adapters, is_adapters, plain_name
from ds_dynmo.models.huggingface.lora_config import peft_package
from ds_dynmo.models.huggingface.source import Source
from ds_dynmo.models.slice_counts import rows_of_slices

__all__ = ["SavedLayer", "merged", "write_adapters"]

_PREFIX = "base_model.model."  # peft's, of what is in the model that it wraps
_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class SavedLayer:
    """A part of the model in a checkpoint.

    Attributes:
        path: of the first file that the tensors are from.
        tensors: by the names in transformers' module of the part.
        attributes: plain ones of each module in the part, by its path.
        left_out: by the names in the part, digests of frozen weights that were not saved: of each, or of its slices.
    """

    path: Path
    tensors: Mapping[str, torch.Tensor]
    attributes: Mapping[str, Mapping[str, Any]]
    left_out: Mapping[str, list[str]]

    @classmethod
    def of(
        cls, path: Path, tensors: Mapping[str, torch.Tensor], beside: Iterable[Mapping[str, Any]], prefix: str
    ) -> SavedLayer:
        """Take from ``beside``, our files of the layers, what they say of the part.

        Args:
            prefix: of the part's names there.
        """
        attributes: dict[str, Mapping[str, Any]] = {}
        left_out: dict[str, list[str]] = {}
        for content in beside:
            for module, values in _without(prefix, content.get("attributes", {})).items():
                attributes[module] = {**attributes.get(module, {}), **values}
            for name, expected in _without(prefix, content.get(LEFT_OUT, {})).items():
                left_out.setdefault(name, []).append(expected)
        return cls(path, tensors, attributes, left_out)


def _without(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name[len(prefix) :]: value for name, value in values.items() if f"{name}.".startswith(prefix)}


def write_adapters(
    adapters: Adapters, base: str | None, layers: Iterable[tuple[str, SavedLayer]], folder: Path
) -> None:
    """Write an adapter's folder, the config last.

    Args:
        base: of which model the adapters are, for the config.
        layers: each with transformers' path of its part.

    Raises:
        CheckpointError: tensors are not those of the adapters, or these were trained with other factors.
    """
    from safetensors.torch import save_file

    state: dict[str, torch.Tensor] = {}
    for part, saved in layers:
        for name, like in adapters.part(part).state_dict().items():
            if is_adapters(name) or adapters.trainable.get(f"{part}.{name}"):
                _check(saved.tensors.get(name), like, f"{saved.path}: {part}.{name}")
                state[f"{_PREFIX}{part}.{name}"] = saved.tensors[name]
        _check_scale(adapters, part, saved)
    found = peft_package().get_peft_model_state_dict(
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


def merged(source: Source, layer: int, saved: SavedLayer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Add a layer's adapters to its weights in fp32, and name them as transformers' files do.

    Args:
        source: reads the base where the checkpoint lacks it.
        dtype: of the result, that in which the layers were trained.

    Raises:
        CheckpointError: tensors are not those of the layer, adapters were trained with other factors or on another
            base, or there is no base.
        ConfigError: peft cannot merge such adapters.
    """
    assert source.adapters is not None
    part = source.outline.paths[layer]
    values: dict[str, torch.Tensor] = {}
    base: dict[str, torch.Tensor] = {}
    for name, like in source.adapters.part(part).state_dict().items():
        own = plain_name(name)
        if name not in saved.tensors and own is not None and not is_adapters(name):
            if source.tensors is None:
                raise CheckpointError(f"{saved.path}: lacks {part}.{name}, and a model with fresh weights has no other")
            base = base or source.build_base(layer).state_dict()
            _check_base(saved, name, base[own], dtype, part)
            values[name] = base[own]
        else:
            _check(saved.tensors.get(name), like, f"{saved.path}: {part}.{name}")
            values[name] = saved.tensors[name]
    _check_scale(source.adapters, part, saved)
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


def _check_base(saved: SavedLayer, name: str, weight: torch.Tensor, dtype: torch.dtype, part: str) -> None:
    """Refuse a base that is not the one that adapters were trained on, in the precision of its file or of training."""
    expected = saved.left_out.get(name, [])
    pieces = [weight]
    if len(expected) > 1:
        pieces = [weight[rows.start : rows.stop] for rows in rows_of_slices(len(weight), len(expected))]
    if any(said not in (digest(rows.to(dtype)), digest(rows)) for said, rows in zip(expected, pieces)):
        raise CheckpointError(
            f"{saved.path}: lacks {part}.{name}, and the model has other values of it than when it was saved: merge "
            "with the base that the adapters were trained on"
        )


def _check_scale(adapters: Adapters, part: str, saved: SavedLayer) -> None:
    """Refuse a config by which adapters would be added with another factor than they were trained with."""
    for path, module in adapters.part(part).named_modules():
        if isinstance(module, peft_package().tuners.lora.LoraLayer):
            says = module.scaling[adapters.name]
            has = saved.attributes.get(path, {}).get("scaling", {}).get(adapters.name, says)
            if has != says:
                raise CheckpointError(
                    f"{saved.path}: {part}.{path}: its adapter was trained with scaling {has}, by peft's config it is "
                    f"{says}: r, lora_alpha and the like should be as in the training"
                )
