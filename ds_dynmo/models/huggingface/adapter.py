"""GPT-2, Llama, Qwen and Mixtral models of Hugging Face's transformers as layers of a pipeline, and back.

The library's own modules compute (:mod:`ds_dynmo.models.huggingface.modules` puts them together), so that logits and
gradients are those of the library's model. Weights are fp32 whatever the files hold: precision is the engine's matter.
Attention is torch's ``scaled_dot_product_attention`` ("sdpa"), the library's default.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.configs import (
    FAMILIES,
    config_of,
    experts_of,
    name_of,
    router_loss,
    transformers,
    window,
)
from ds_dynmo.models.huggingface.experts import Experts, MoEDecoderLayer
from ds_dynmo.models.huggingface.modules import (
    DecoderLayer,
    FinalNorm,
    OutputHead,
    PositionEmbedding,
    TokenEmbedding,
    tied_logits,
)
from ds_dynmo.models.huggingface.weights import (
    ExpertFiles,
    Folder,
    InMemory,
    Stored,
    Tensors,
    check_tensors,
    stored,
)
from ds_dynmo.models.seeding import generator_for

__all__ = ["PART", "Source", "layers", "source_of"]

TIE = "embedding"
PART = "part."  # in each of our layers, the name of the library's module


def layers(
    model: Any,
    *,
    seed: int = 0,
    sequence_length: int | None = None,
    vocab_size: int | None = None,
    expert_parallel: bool = False,
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
        expert_parallel: the data-parallel replicas of a stage share a layer's experts. Each reads its own from a
            folder, when :func:`ds_dynmo.initialize` tells it which.

    Raises:
        ConfigError: no such files, a model that is none of these families, tensors that are not the config's, no
            transformers, or ``expert_parallel`` for a model without experts. Nothing has been built.
    """
    source = source_of(model, seed, parallel=expert_parallel)
    config, experts = source.config, source.experts
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
        about = (source.of(layer), layer, window(config, block), loss)
        specs.append(
            LayerSpec(DecoderLayer, *about) if experts is None else LayerSpec(MoEDecoderLayer, *about, experts)
        )
    layer = len(specs)
    return [*specs, LayerSpec(FinalNorm, source.of(layer), layer), head]


# -- the library's model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model of the library's without memory, and where the weights of its parts come from.

    Attributes:
        skeleton: the library's model on the "meta" device.
        paths: per pipeline layer, the path of its part in ``skeleton``; a tied head has the last one.
        tensors: None for fresh weights.
        files: of experts; None: tensors are named as in memory.
        experts: of a decoder layer, if any.
        trainable: ``requires_grad`` by the library's name; True where it says nothing.
    """

    skeleton: Any
    paths: tuple[str, ...]
    tensors: Tensors | None
    files: ExpertFiles | None
    experts: Experts | None
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
            name: stored(f"{path}.{name}", tuple(parameter.shape), self.files)
            for name, parameter in self.skeleton.get_submodule(path).named_parameters()
        }

    @property
    def reads_later(self) -> bool:
        """See :class:`~ds_dynmo.models.huggingface.experts.PartsWithExperts`; fresh weights are drawn together."""
        return self.tensors is not None and self.experts is not None and self.experts.parallel

    def of(self, layer: int) -> Source:
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

    def read_experts(self, part: nn.Module, layer: int, share: slice) -> None:
        """See :class:`~ds_dynmo.models.huggingface.experts.PartsWithExperts`."""
        assert self.tensors is not None and self.experts is not None
        places, path = self.stored(layer), self.experts.path
        for name, parameter in part.get_submodule(path).named_parameters():
            own = torch.empty_like(parameter[share], memory_format=torch.contiguous_format)
            place = places[f"{path}.{name}"]
            if self.files is None:
                own.copy_(self.tensors.read(place.names)[place.names[0]][share])
            else:
                place = place.of_experts(share, self.experts.count)
                _copy(self.tensors.read(place.names), place, own)
            parameter.data = own

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
        later = f"{self.experts.path}." if self.reads_later and self.experts is not None else None
        for name, parameter in part.named_parameters():
            if later is not None and name.startswith(later):
                parameter.data = parameter.new_empty(()).expand(parameter.shape)  # no memory
            else:
                _copy(tensors.read(places[name].names), places[name], parameter.detach())


def _copy(found: Mapping[str, torch.Tensor], place: Stored, target: torch.Tensor) -> None:
    for name, piece in place.pieces(target).items():
        piece.copy_(found[name])


def source_of(model: Any, seed: int, *, weights: bool = True, parallel: bool = False) -> Source:
    config = config_of(model)
    experts = experts_of(config, name_of(model), parallel=parallel)
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
    moe = FAMILIES[config.model_type].moe
    files = None if moe is None or isinstance(tensors, InMemory) else moe.files
    source = Source(skeleton, _paths(skeleton), tensors, files, experts, seed, trainable)
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
