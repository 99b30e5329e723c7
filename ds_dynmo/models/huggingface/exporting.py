"""Write a checkpoint's weights in the format of Hugging Face's transformers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.files.checkpoints import REPLICA_OWN, layer_file
from ds_dynmo.models.exporting import load, new_folder, tag_folder, weights_file
from ds_dynmo.models.huggingface.adapter import PART, source_of
from ds_dynmo.models.huggingface.adapter_files import SavedLayer, merged, write_adapters
from ds_dynmo.models.huggingface.configs import name_of, tokenizer_files
from ds_dynmo.models.huggingface.conversions import to_files
from ds_dynmo.models.huggingface.pruning import prunable_shapes
from ds_dynmo.models.huggingface.source import Source
from ds_dynmo.models.huggingface.verification import find_halves
from ds_dynmo.models.huggingface.vocabulary import slices_of
from ds_dynmo.models.huggingface.weights import INDEX
from ds_dynmo.models.pruning.sparse_linear import dense_tensors
from ds_dynmo.models.slice_counts import Slices

__all__ = ["export"]

BESIDE_WEIGHTS = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "generation_config.json")


def export(
    model: Any,
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    peft: Any = None,
    merge: bool = False,
    vocabulary_slices: Slices = None,
    split_blocks: bool = False,
    untie: bool = False,
) -> None:
    """Write the weights of a checkpoint in transformers' format, for its ``from_pretrained``.

    One process reads and writes one layer after the other, whatever the partition was that saved them; weights have
    the dtype that they were trained in, slices of the vocabulary become one matrix, halves one decoder layer, and
    pruned weights dense ones with zeros. Of a model with adapters, those alone are written, for peft's
    ``from_pretrained``. The folder appears when it is whole.

    Args:
        model, peft, vocabulary_slices, split_blocks, untie: what :func:`~ds_dynmo.models.huggingface.layers` made the
            layers of. Only configs count, unless adapters are merged with a base that the checkpoint lacks; the
            tokenizer in the folder ``model`` is copied.
        checkpoint: what ``engine.save_checkpoint`` wrote: the folder with the file ``latest``, or that of a tag.
        folder: gets ``config.json``, safetensors files and their index; or ``adapter_config.json`` and
            ``adapter_model.safetensors``. Has to be empty or not there.
        merge: add adapters to the weights, and write the whole model.

    Raises:
        ConfigError: as :func:`~ds_dynmo.models.huggingface.layers`, or ``folder`` is not empty.
        CheckpointError: the checkpoint lacks a layer's file, it holds other layers or tensors than the model has, or
            adapters were trained with other factors, or on another base, than ``model`` and ``peft`` say.
    """
    source = source_of(model, seed=0, weights=False, peft=peft, untie=untie)
    saved, out = tag_folder(Path(checkpoint)), Path(folder)
    source = replace(source, slices=slices_of(source, vocabulary_slices, name_of(model)))
    source = find_halves(source, name_of(model)) if split_blocks else source
    if merge and source.adapters is None:
        raise ConfigError("merge: the model has no adapters: peft says which")
    layers = range(source.outline.num_layers)
    for path in (saved / weights_file(number) for layer in layers for number in source.places(layer)):
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no such file{_hint(source)}")
    with new_folder(out) as new:
        _copy_tokenizer(model, new)
        if source.adapters is not None and not merge:
            parts = ((source.outline.paths[layer], _saved_layer(source, layer, saved)) for layer in layers)
            write_adapters(source.adapters, _base_of(model, source), parts, new)
            return
        files = [layer for layer in layers if source.shapes(layer)]  # norms may have none
        if merge:
            base = source_of(model, seed=0, peft=peft, untie=untie)
            every = (load(saved / weights_file(number)) for layer in files for number in source.places(layer))
            dtype = next(tensor.dtype for state in every for tensor in state.values())  # not a frozen layer's
            made = (merged(base, layer, _saved_layer(source, layer, saved), dtype) for layer in files)
        else:
            made = (_exported(source, layer, saved) for layer in files)
        _write_model(source, made, len(files), new)
        beyond = saved / weights_file(source.places(layers[-1]).stop)
        if beyond.is_file():  # looked for last: the layers before say more, if they are others too
            why = ", whose head is its embedding: was it trained with untie?" if source.tied else ""
            raise CheckpointError(f"{beyond}: is no layer of the model{why}")


def _copy_tokenizer(model: Any, folder: Path) -> None:
    """Copy what a model's folder has beside its weights."""
    if isinstance(model, (str, os.PathLike)):
        for path in (Path(model) / name for name in (*tokenizer_files(model), *BESIDE_WEIGHTS)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def _write_model(source: Source, layers: Iterable[dict[str, torch.Tensor]], num_files: int, folder: Path) -> None:
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, tensors in enumerate(layers, start=1):
        name = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        _write_tensors(folder / name, tensors)
        weight_map.update(dict.fromkeys(tensors, name))
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        source.config.dtype = next(iter(tensors.values())).dtype
    source.config.architectures = [type(source.skeleton).__name__]
    source.config.save_pretrained(folder)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _base_of(model: Any, source: Source) -> str | None:
    """Name the model that adapters belong to, as its folder."""
    if isinstance(model, (str, os.PathLike)):
        return str(model)
    return source.adapters.lora_config.base_model_name_or_path if source.adapters is not None else None


def _saved_layer(source: Source, layer: int, folder: Path) -> SavedLayer:
    numbers = source.places(layer)
    beside = [folder / layer_file(number, 0, 0) for number in numbers]
    found = [load(one) for one in beside if one.is_file()]
    return SavedLayer.of(folder / weights_file(numbers[0]), _saved(source, layer, folder), found, PART)


def _saved(source: Source, layer: int, folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a part of the model, by the names in transformers' module of it.

    One pipeline layer has all of it, each half of a decoder layer has some tensors, or each slice some rows.
    """
    numbers = source.places(layer)
    first, *others = every = [_of_layer(folder, number) for number in numbers]
    for number, other in zip(numbers[1:], others):
        if {*first} & {*other} if source.is_block(layer) else _rows(other) != _rows(first):
            what = "other half" if source.is_block(layer) else "rows of the matrix"
            raise CheckpointError(
                f"{folder / weights_file(number)}: has no {what} of {weights_file(numbers[0])}{_hint(source)}"
            )
    if others and not source.is_block(layer):
        return {name: torch.cat([one[name] for one in every]) for name in first}
    return {name: tensor for one in every for name, tensor in one.items()}


def _hint(source: Source) -> str:
    said = [f"vocabulary_slices {source.slices}"] if source.slices else []
    said += ["split_blocks"] if source.halves else []
    said += ["untie"] if source.untied else []
    return f": was the model trained with {' and '.join(said)}?" if said else ""


def _rows(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape[1:] for name, tensor in tensors.items()}


def _of_layer(folder: Path, number: int) -> dict[str, torch.Tensor]:
    found = {name.removeprefix(PART): value for name, value in load(folder / weights_file(number)).items()}
    shares = _shares(folder, number)
    return found | {name: torch.cat([share[name] for share in shares]) for name in (shares[0] if shares else ())}


def _exported(source: Source, layer: int, folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a part of the model, named as transformers names them."""
    found, path = _saved(source, layer, folder), folder / weights_file(source.places(layer)[0])
    part = source.outline.paths[layer]
    if source.is_block(layer):
        found = dense_tensors(found, prunable_shapes(source.skeleton.get_submodule(part)))
    expected = {name: torch.Size(shape) for name, shape in source.shapes(layer).items()}
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
