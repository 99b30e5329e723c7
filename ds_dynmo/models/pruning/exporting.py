"""Write a checkpoint's weights as dense ones, with zeros where they are pruned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from ds_dynmo.errors import CheckpointError
from ds_dynmo.models.exporting import load, new_folder, tag_folder, weights_file
from ds_dynmo.models.pruning.kernels import dense
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear

__all__ = ["export"]


def export(layers: Sequence[LayerSpec], checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the weights of a checkpoint for the same model without pruning, a file per layer as DeepSpeed names them.

    Each holds the layer's ``state_dict``, in the dtype that was trained in. One process reads and writes one layer
    after the other, whatever the partition was that saved them.

    Args:
        layers: of the model that was trained.
        checkpoint: what ``engine.save_checkpoint`` wrote: the folder with the file ``latest``, or that of a tag.
        folder: has to be empty or not there.

    Raises:
        ConfigError: ``folder`` is not empty.
        CheckpointError: the checkpoint lacks a layer's file, or it is of another model.
    """
    saved, out = tag_folder(Path(checkpoint)), Path(folder)
    tied: set[str] = set()
    numbers = []
    for number, spec in enumerate(layers):
        there = (saved / weights_file(number)).is_file()
        if isinstance(spec, TiedLayerSpec):
            if spec.key in tied and not there:
                continue  # the first use has the weights
            tied.add(spec.key)
        if not there:
            raise CheckpointError(f"{saved / weights_file(number)}: there is no such file")
        numbers.append(number)
    with new_folder(out) as new:
        for number in numbers:
            path = saved / weights_file(number)
            torch.save(_dense(load(path), layers[number], path), new / path.name)


def _dense(state: dict[str, Any], spec: LayerSpec, path: Path) -> dict[str, Any]:
    """Put dense weights in the place of vectors and their places."""
    state = dict(state)
    for name, part in spec.build().named_modules():
        if not isinstance(part, PrunableLinear):
            continue
        prefix = f"{name}." if name else ""
        weight = state.get(f"{prefix}weight")
        index, _ = state.pop(f"{prefix}index", None), state.pop(f"{prefix}mask", None)
        if weight is not None and weight.dim() == 1 and index is not None:
            weight = dense(weight, index, part.shape)
        if weight is None or weight.shape != part.shape:
            raise CheckpointError(f"{path}: {prefix}weight is not of the model: expected shape {list(part.shape)}")
        state[f"{prefix}weight"] = weight
    return state
