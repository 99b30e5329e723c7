"""What tensors of transformers' files become in its models, and back, by transformers' own table of conversions."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.configs import library_module
from ds_dynmo.models.huggingface.weights import Stored

__all__ = ["locate", "made_shapes", "to_files"]


def locate(model: Any, names: Collection[str]) -> tuple[dict[str, Stored], list[str]]:
    """Find what the tensors ``names`` of files are in transformers' ``model``.

    Returns:
        By the first tensor that they make, what it is made of; and the names that make nothing.
    """
    loading, table = library_module("core_model_loading"), library_module("conversion_mapping")
    mapping = table.get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, list[tuple[str, str | None]]] = {}
    unknown = []
    for name in sorted(names, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            unknown.append(name)
        else:
            sources.setdefault(target, []).append((name, pattern))
    return {target: _stored(target, found, by_pattern) for target, found in sources.items()}, unknown


def _stored(target: str, found: list[tuple[str, str | None]], converters: Mapping[str, Any]) -> Stored:
    pattern = found[0][1]
    if pattern is None:
        return Stored(target, (found[0][0],))
    names, patterns = zip(*found)
    return Stored(target, names, patterns, copy.deepcopy(converters[pattern]), target)


def made_shapes(
    model: Any, stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], label: str
) -> dict[str, tuple[Stored, tuple[int, ...]]]:
    """Find what is made of files' tensors, by its name in transformers' ``model``, with its shape; nothing is read.

    Args:
        shapes: of the files' tensors.
        label: of the files, for messages.

    Raises:
        ConfigError: transformers cannot make it of such tensors.
    """
    made = {}
    for target, one in stored.items():
        try:
            found = {name: torch.empty(shapes[name], device="meta") for name in one.names}
            for name, value in one.values(found, model).items():
                made[name] = (replace(one, target=name), tuple(value.shape))
        except Exception as error:  # transformers raises many kinds for shapes that do not fit
            raise ConfigError(f"{label}: {target} cannot be made of {', '.join(one.names[:3])}: {error}") from error
    return made


def to_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make what transformers' files hold of tensors of its ``model``."""
    made: dict[str, torch.Tensor] = library_module("core_model_loading").revert_weight_conversion(model, dict(tensors))
    return made
