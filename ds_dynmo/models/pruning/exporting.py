"""Write a checkpoint's weights as those of the plain GPT: dense, with zeros where pruned, and not in slices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from ds_dynmo.errors import CheckpointError
from ds_dynmo.models.exporting import load, new_folder, tag_folder, weights_file
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear, dense_tensors
from ds_dynmo.models.vocabulary_slices import rows_of

__all__ = ["export"]


def export(layers: Sequence[LayerSpec], checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the weights of a checkpoint for the same model without pruning and without slices of the vocabulary.

    There is a file per layer of that model, as DeepSpeed names them.

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
    parts: dict[int, list[int]] = {}  # by the layer's number in the model without slices
    number = -1
    for layer, spec in enumerate(layers):
        rows = rows_of(spec)
        number += rows is None or rows.start == 0
        there = (saved / weights_file(layer)).is_file()
        if isinstance(spec, TiedLayerSpec):
            if spec.key in tied and not there:
                continue  # the first use has the weights
            tied.add(spec.key)
        if not there:
            raise CheckpointError(f"{saved / weights_file(layer)}: there is no such file")
        parts.setdefault(number, []).append(layer)
    with new_folder(out) as new:
        for number, own in parts.items():
            states = [_dense(saved / weights_file(layer), layers[layer]) for layer in own]
            whole = {name: torch.cat([state[name] for state in states]) for name in states[0]}
            torch.save(whole if len(own) > 1 else states[0], new / weights_file(number))


def _dense(path: Path, spec: LayerSpec) -> dict[str, Any]:
    """Read a layer's weights, and put dense ones in the place of vectors and their places."""
    state, rows = load(path), rows_of(spec)
    if rows is not None:
        if state.keys() != {"weight"} or len(state["weight"]) != len(rows):
            raise CheckpointError(f"{path}: has no {len(rows)} rows of the vocabulary: is it of the model?")
        return state
    linears = ((name, part) for name, part in spec.build().named_modules() if isinstance(part, PrunableLinear))
    shapes = {f"{name}.weight": part.shape for name, part in linears}
    state = dense_tensors(state, shapes)
    for name, shape in shapes.items():
        if name not in state or state[name].shape != shape:
            raise CheckpointError(f"{path}: {name} is not of the model: expected shape {list(shape)}")
    return state
