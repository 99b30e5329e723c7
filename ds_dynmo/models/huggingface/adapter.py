"""GPT-2, Llama, Qwen and Mixtral models of Hugging Face's transformers as layers of a pipeline, and back.

The library's own modules compute (:mod:`ds_dynmo.models.huggingface.modules` puts them together), so that logits and
gradients are those of the library's model. Weights are fp32 whatever the files hold: precision is the engine's matter.
Attention is torch's ``scaled_dot_product_attention`` ("sdpa"), the library's default.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models.huggingface.configs import FAMILIES, config_of, name_of, router_loss, transformers, window
from ds_dynmo.models.huggingface.modules import (
    DecoderLayer,
    FinalNorm,
    OutputHead,
    PositionEmbedding,
    TokenEmbedding,
    tied_logits,
)
from ds_dynmo.models.huggingface.weights import INDEX, Folder, InMemory, Stored, Tensors, check_tensors, stored
from ds_dynmo.models.seeding import generator_for

__all__ = ["export", "layers"]

TIE = "embedding"
PART = "part."  # in each of our layers, the name of the library's module


def layers(
    model: Any, *, seed: int = 0, sequence_length: int | None = None, vocab_size: int | None = None
) -> list[LayerSpec]:
    """Build the layer list for a ``PipelineModule``: embedding, learned positions (GPT-2), decoder layers, norm, head.

    A tied head and the embedding are one ``TiedLayerSpec`` key, "embedding". ``loss_fn`` is
    :func:`~ds_dynmo.models.gpt.language_model_loss`, which adds Mixtral's router loss if the config says
    ``output_router_logits``, as in the library. Unlike the library, evaluations leave it out.

    Args:
        model: a local folder with ``config.json`` and safetensors files, of which each layer reads its own tensors
            when it is built; the path of a ``config.json``, a config object of the library's or its dict (with
            "model_type") for fresh weights; or a model object, whose weights are copied.
        seed: what fresh weights are drawn from, a generator for each layer: the same under every partition.
        sequence_length: tokens of a training sequence, which have to fit the model's positions.
        vocab_size: different tokens of the data, which the model has to know.

    Raises:
        ConfigError: no such files, a model that is none of these families, tensors that are not the config's, or
            no transformers. Nothing has been built.
    """
    source = _source(model, seed)
    config = source.config
    positions, vocabulary = config.max_position_embeddings, config.vocab_size
    if sequence_length is not None and sequence_length > positions:
        raise ConfigError(f"sequence_length {sequence_length}: the model has {positions} positions")
    if vocab_size is not None and vocab_size > vocabulary:
        raise ConfigError(f"vocab_size {vocabulary}: should be at least {vocab_size}, the data's")
    loss = router_loss(config)
    if source.tied:
        tie = {"tied_weight_attr": f"{PART}weight"}
        embedding = TiedLayerSpec(TIE, TokenEmbedding, source.of(0), 0, loss, **tie)
        # The head has the forward_fn: checkpoints hold the state of the tied layer that has none.
        head = TiedLayerSpec(TIE, TokenEmbedding, source.of(0), 0, loss, forward_fn=tied_logits, **tie)
    else:
        last = len(source.paths) - 1
        embedding = LayerSpec(TokenEmbedding, source.of(0), 0, loss)
        head = LayerSpec(OutputHead, source.of(last), last, loss)
    specs = [embedding]
    if FAMILIES[config.model_type].positions:
        specs.append(LayerSpec(PositionEmbedding, source.of(1), 1, config.embd_pdrop))
    for block in range(config.num_hidden_layers):
        layer = len(specs)
        specs.append(LayerSpec(DecoderLayer, source.of(layer), layer, window(config, block), loss))
    layer = len(specs)
    return [*specs, LayerSpec(FinalNorm, source.of(layer), layer), head]


def export(model: Any, checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the weights of a checkpoint in the library's format, for its ``from_pretrained``.

    One process reads and writes one layer after the other, whatever the partition was that saved them; weights have
    the dtype that they were trained in. The index is written last: a folder without it is not whole.

    Args:
        model: what :func:`layers` made the layers of; only its config counts.
        checkpoint: what ``engine.save_checkpoint`` wrote: the folder with the file ``latest``, or that of a tag.
        folder: gets ``config.json``, safetensors files and their index; has to be empty or not there.

    Raises:
        ConfigError: as :func:`layers`, or ``folder`` is not empty.
        CheckpointError: the checkpoint lacks a layer's file, or it holds other tensors than the model has.
    """
    source, saved, out = _source(model, seed=0, weights=False), _tag_folder(Path(checkpoint)), Path(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: is there already: it should be an empty folder, or not exist")
    files = [(layer, saved / f"layer_{layer:02d}-model_states.pt") for layer in range(len(source.paths) - source.tied)]
    for _, path in files:
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no such file")
    out.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    num_bytes = 0
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


# -- the library's model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A model of the library's without memory, and where the weights of its parts come from.

    Attributes:
        skeleton: the library's model on the "meta" device.
        paths: per pipeline layer, the path of its part in ``skeleton``; a tied head has the last one.
        tensors: None for fresh weights.
        converted: tensors are named as in files of Mixtral's.
        trainable: ``requires_grad`` by the library's name; True where it says nothing.
    """

    skeleton: Any
    paths: tuple[str, ...]
    tensors: Tensors | None
    converted: bool
    seed: int
    trainable: Mapping[str, bool]

    @property
    def config(self) -> Any:
        return self.skeleton.config

    @property
    def tied(self) -> bool:
        """Are embedding and head one weight?"""
        return self.skeleton.get_input_embeddings().weight is self.skeleton.get_output_embeddings().weight

    def stored(self, layer: int) -> dict[str, Stored]:
        """Locate the parameters of pipeline layer ``layer``, by their names in the library's module."""
        path = self.paths[layer]
        return {
            name: stored(f"{path}.{name}", tuple(parameter.shape), converted=self.converted)
            for name, parameter in self.skeleton.get_submodule(path).named_parameters()
        }

    def of(self, layer: int) -> _Source:
        """Narrow this to pipeline layer ``layer``, so that its spec keeps no other layer's weights alive."""
        if self.tensors is None:
            return self
        return replace(self, tensors=self.tensors.only(self._names(layer)))

    def build(self, layer: int) -> nn.Module:
        """Build the library's module of pipeline layer ``layer`` with its weights, on the CPU."""
        config, path = self.config, self.paths[layer]
        part: nn.Module = copy.deepcopy(self.skeleton.get_submodule(path), {id(config): config})
        part.to_empty(device=torch.device("cpu")).train()
        if self.tensors is None:
            self._initialize(part, layer)
        else:
            self._read(part, layer, self.tensors)
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(self.trainable.get(f"{path}.{name}", True))
        return part

    def build_rotary(self) -> nn.Module | None:
        """Build the rotary positions of every decoder layer; None: the model has learned ones."""
        rotary = getattr(self.skeleton.base_model, "rotary_emb", None)
        return None if rotary is None else type(rotary)(self.config)

    def _names(self, layer: int) -> list[str]:
        return [name for place in self.stored(layer).values() for name in place.names]

    def _initialize(self, part: nn.Module, layer: int) -> None:
        """Initialize as the library does. It draws from torch's generator, whose own state is put back afterwards."""
        state = torch.get_rng_state()
        torch.set_rng_state(generator_for("layer", self.seed, layer).get_state())
        try:
            part.apply(self.skeleton._init_weights)
        finally:
            torch.set_rng_state(state)

    def _read(self, part: nn.Module, layer: int, tensors: Tensors) -> None:
        places = self.stored(layer)
        found = tensors.read(self._names(layer))
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                for piece, target in places[name].pieces(parameter).items():
                    target.copy_(found[piece])


def _source(model: Any, seed: int, *, weights: bool = True) -> _Source:
    config = config_of(model)
    with torch.device("meta"):
        try:
            skeleton = transformers().AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
        except Exception as error:  # the library raises many kinds for sizes that do not fit
            raise ConfigError(f"{name_of(model)}: transformers cannot build the model: {error}") from error
    trainable: Mapping[str, bool] = {}
    tensors: Tensors | None = None
    if isinstance(model, nn.Module) and weights:
        tensors = InMemory(model.state_dict())
        trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    elif isinstance(model, (str, os.PathLike)) and Path(model).is_dir() and weights:
        tensors = Folder(Path(model), skeleton.base_model_prefix)
    converted = config.model_type == "mixtral" and not isinstance(tensors, InMemory)
    source = _Source(skeleton, _paths(skeleton), tensors, converted, seed, trainable)
    if tensors is not None:
        expected = {
            name: place.shape
            for layer in range(len(source.paths) - source.tied)
            for place in source.stored(layer).values()
            for name in place.names
        }
        check_tensors(tensors, expected, optional=("lm_head.weight",) if source.tied else ())
    return source


def _paths(skeleton: Any) -> tuple[str, ...]:
    """List the path of each pipeline layer's part."""
    family, base = FAMILIES[skeleton.config.model_type], skeleton.base_model
    parts = [skeleton.get_input_embeddings()]
    parts += [getattr(base, family.positions)] if family.positions else []
    parts += [*getattr(base, family.blocks), getattr(base, family.norm), skeleton.get_output_embeddings()]
    path = {id(module): name for name, module in skeleton.named_modules()}
    return tuple(path[id(part)] for part in parts)


# -- export -------------------------------------------------------------------------------------------------


def _tag_folder(checkpoint: Path) -> Path:
    latest = checkpoint / "latest"
    if latest.is_file():
        return checkpoint / latest.read_text().strip()
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: there is no such folder")
    return checkpoint


def _exported(source: _Source, layer: int, path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of one pipeline layer, named as the library names them."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    found = {name.removeprefix(PART): value for name, value in state.items()}
    part = source.skeleton.get_submodule(source.paths[layer])
    expected = {name: parameter.shape for name, parameter in part.named_parameters()}
    shapes = {name: value.shape for name, value in found.items()}
    if shapes != expected:
        differing = sorted(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
        raise CheckpointError(
            f"{path}: is not layer {layer} of the model, {source.paths[layer]}: {differing[0]} has "
            f"{_shape(shapes.get(differing[0]))}, expected {_shape(expected.get(differing[0]))}"
        )
    places = source.stored(layer)
    return {n: piece for name, value in found.items() for n, piece in places[name].pieces(value.contiguous()).items()}


def _shape(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else f"shape {list(shape)}"


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
