"""Write a checkpoint's weights in the format of Hugging Face's transformers."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ds_dynmo.checkpoint_files import REPLICA_OWN, layer_file
from ds_dynmo.errors import CheckpointError
from ds_dynmo.models.exporting import check_is_new, load, tag_folder, weights_file
from ds_dynmo.models.huggingface.adapter import PART, source_of
from ds_dynmo.models.huggingface.conversions import to_files
from ds_dynmo.models.huggingface.source import Source
from ds_dynmo.models.huggingface.weights import INDEX

__all__ = ["export"]


def export(model: Any, checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the weights of a checkpoint in the library's format, for its ``from_pretrained``.

    One process reads and writes one layer after the other, whatever the partition was that saved them; weights have
    the dtype that they were trained in. The index is written last: a folder without it is not whole.

    Args:
        model: what :func:`~ds_dynmo.models.huggingface.layers` made the layers of; only its config counts.
        checkpoint: what ``engine.save_checkpoint`` wrote: the folder with the file ``latest``, or that of a tag.
        folder: gets ``config.json``, safetensors files and their index; has to be empty or not there.

    Raises:
        ConfigError: as :func:`~ds_dynmo.models.huggingface.layers`, or ``folder`` is not empty.
        CheckpointError: the checkpoint lacks a layer's file, or it holds other tensors than the model has.
    """
    source, saved, out = source_of(model, seed=0, weights=False), tag_folder(Path(checkpoint)), Path(folder)
    check_is_new(out)
    files = [(layer, saved / weights_file(layer)) for layer in range(source.outline.num_layers)]
    for _, path in files:
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no such file")
    out.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    files = [(layer, path) for layer, path in files if source.shapes(layer)]  # a norm may have no weights
    for number, (layer, path) in enumerate(files, start=1):
        tensors = _exported(source, layer, path)
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_tensors(out / name, tensors)
        weight_map.update(dict.fromkeys(tensors, name))
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        source.config.dtype = next(iter(tensors.values())).dtype
    source.config.architectures = [type(source.skeleton).__name__]
    source.config.save_pretrained(out)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _exported(source: Source, layer: int, path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of one pipeline layer, named as the library names them."""
    found = {name.removeprefix(PART): value for name, value in load(path).items()}
    part = source.outline.paths[layer]
    expected = {name: torch.Size(shape) for name, shape in source.shapes(layer).items()}
    shares = _shares(path.parent, layer)
    found |= {name: torch.cat([share[name] for share in shares]) for name in (shares[0] if shares else ())}
    shapes = {name: value.shape for name, value in found.items()}
    if shapes != expected:
        differing = sorted(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
        raise CheckpointError(
            f"{path}: is not layer {layer} of the model, {part}: {differing[0]} has "
            f"{_shape(shapes.get(differing[0]))}, expected {_shape(expected.get(differing[0]))}"
        )
    return to_files(source.skeleton, {f"{part}.{name}": value.contiguous() for name, value in found.items()})


def _shares(folder: Path, layer: int) -> list[dict[str, torch.Tensor]]:
    """Read the experts that each data-parallel replica saved; empty where all had all of them."""
    shares: list[dict[str, torch.Tensor]] = []
    for replica in count():
        path = folder / layer_file(layer, replica, 0)
        own = load(path).get(REPLICA_OWN) if path.is_file() else None
        if own is None:
            return shares
        shares.append({name.removeprefix(PART): content["weight"] for name, content in own.items()})
    raise AssertionError("files have numbers without end")


def _shape(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else f"shape {list(shape)}"


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
