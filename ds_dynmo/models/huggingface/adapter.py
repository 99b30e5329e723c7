"""Causal language models of Hugging Face's transformers as layers of a pipeline.

A family's configuration declares of what parts the model consists, in ``base_model_pp_plan``. Transformers' own modules
compute (:mod:`ds_dynmo.models.huggingface.modules` puts them together), so that logits and gradients are those of the
library's model; :mod:`ds_dynmo.models.huggingface.verification` compares them. Weights are fp32 whatever the files
hold: precision is the engine's matter.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.utils import logger
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.configs import config_of, default_attention, name_of, transformers
from ds_dynmo.models.huggingface.conversions import locate, made_shapes
from ds_dynmo.models.huggingface.experts import MoEDecoderLayer
from ds_dynmo.models.huggingface.halves import Half
from ds_dynmo.models.huggingface.in_memory import take_settings
from ds_dynmo.models.huggingface.lora import Adapters, adapters_in, base_tensors
from ds_dynmo.models.huggingface.lora_config import Lora, split_off
from ds_dynmo.models.huggingface.modules import (
    DecoderLayer,
    DecoderNorm,
    InputEmbedding,
    LMHead,
    PositionEmbedding,
    RouterLoss,
    tied_logits,
)
from ds_dynmo.models.huggingface.moe import find_experts, find_router_loss
from ds_dynmo.models.huggingface.outline import Outline, outline_of
from ds_dynmo.models.huggingface.pruning import PrunableDecoderLayer, PrunableMoEDecoderLayer, check_prunable
from ds_dynmo.models.huggingface.source import Source
from ds_dynmo.models.huggingface.stubbed_model import StubbedModel
from ds_dynmo.models.huggingface.verification import Trial, find_halves, find_transforms, verify
from ds_dynmo.models.huggingface.vocabulary import slice_layers, slices_of
from ds_dynmo.models.huggingface.weights import Folder, InMemory, Stored, Tensors, check_tensors
from ds_dynmo.models.pruning.config import PruningConfig
from ds_dynmo.models.slice_counts import Slices

__all__ = ["INPUTS", "PART", "build_layers", "source_of", "specs_of"]

TIE = "embedding"
PART = "part."  # in each of our layers, the name of the transformers module
INPUTS = ("attention_mask", "position_ids")  # what a batch may have beside its tokens


def build_layers(
    model: Any,
    *,
    seed: int = 0,
    sequence_length: int | None = None,
    vocab_size: int | None = None,
    expert_parallel: bool = False,
    inputs: Sequence[str] = (),
    attn_implementation: str | None = None,
    verified: bool = True,
    peft: Any = None,
    vocabulary_slices: Slices = None,
    split_blocks: bool = False,
    pruning: PruningConfig | None = None,
    untie: bool = False,
) -> list[LayerSpec]:
    """Build the layer list for a ``PipelineModule``: embedding, learned positions (GPT-2), decoder layers, norm, head.

    A tied head and the embedding are one ``TiedLayerSpec`` key, "embedding". ``loss_fn`` is
    :func:`~ds_dynmo.models.gpt.language_model_loss`, which adds the router loss of a model with experts if the config
    says ``output_router_logits``, as in transformers. Unlike transformers, evaluations leave it out.

    Args:
        model: a local folder with ``config.json`` and safetensors files, of which each layer reads its own tensors
            when it is built; the path of a ``config.json``, a transformers config object or its dict (with
            "model_type") for fresh weights; or a model object, whose weights are copied. A ``PeftModel`` of peft's
            gives its active adapter too.
        seed: what fresh weights are drawn from, a generator for each layer: the same under every partition.
        sequence_length: tokens of a training sequence, which have to fit the model's positions.
        vocab_size: different tokens of the data, which the model has to know.
        expert_parallel: a layer's experts are distributed over the data-parallel replicas of a stage. Each replica
            reads its own from a folder, when :func:`ds_dynmo.initialize` tells it which.
        inputs: what a batch has beside its tokens, int64 ``[batch, sequence]`` each, in this order:
            "attention_mask", 0 for padding; "position_ids", which begin anew with each document of a packed sequence.
            The first layer is given a tuple then.
        attn_implementation: transformers' name; None: "sdpa" where the family has it, else "eager".
        verified: compare a tiny model of these layers with transformers' first, on the CPU, so with other attention
            than kernels of accelerators; False: trust the declared parts.
        peft: LoRA adapters, as peft's ``LoraConfig`` or its keys; all weights but theirs are frozen. Where neither it
            nor peft says which modules get one, all linear layers of attention and dense feed-forward parts do, and
            rank 0 says so. None: no adapters.
        vocabulary_slices: embedding and head are so many layers each; "auto": as many as make one at most half as large
            as a decoder layer, counted in weights, and whole if the head is smaller than one; None: whole. Batches then
            have labels behind their inputs (:func:`ds_dynmo.models.with_labels`), and the model returns the cross
            entropy of each token in place of logits.
        split_blocks: a decoder layer is two layers of the list, its attention and its feed-forward half.
        pruning: the linear layers of the decoder layers can be pruned, which :class:`~ds_dynmo.models.Pruning` does;
            None: they cannot.
        untie: the head of a model whose head and embedding are one weight gets a copy of it, also of one that is drawn,
            and they train apart from then on: the layers are those of a model with ``tie_word_embeddings`` false, as
            which :func:`export` writes it.

    Raises:
        PackingError: ``inputs`` are ("position_ids",), and packed documents see each other in this family.
        ConfigError: no such files, a model that is no chain of the parts that it declares, tensors that are not the
            config's, no transformers, ``expert_parallel`` for a model without experts, or ``untie`` for one whose head
            and embedding are two weights. Nothing has been built.
    """
    unknown = [name for name in inputs if name not in INPUTS]
    if unknown or len(set(inputs)) != len(inputs):
        raise ConfigError(f"inputs {list(inputs)}: should be different ones of {', '.join(INPUTS)}")
    source = source_of(
        model,
        seed,
        parallel=expert_parallel,
        inputs=inputs,
        attn_implementation=attn_implementation,
        peft=peft,
        untie=untie,
    )
    positions, vocabulary = source.positions, source.config.vocab_size
    if sequence_length is not None and positions is not None and sequence_length > positions:
        raise ConfigError(f"sequence_length {sequence_length}: the model has {positions} positions")
    if vocab_size is not None and vocab_size > vocabulary:
        raise ConfigError(f"vocab_size {vocabulary}: should be at least {vocab_size}, the data's")
    source = find_transforms(source, name_of(model))
    source = replace(source, slices=slices_of(source, vocabulary_slices, name_of(model)))
    source = find_halves(source, name_of(model)) if split_blocks else source
    if pruning is not None:
        check_prunable(source, name_of(model))
        source = replace(source, pruning=pruning)
    specs = specs_of(source, name_of(model))
    if verified:
        verify(source, name_of(model), _specs_like)
    if source.adapters is not None and source.adapters.chosen and int(os.environ.get("RANK", 0)) == 0:
        targets, kind = ", ".join(source.adapters.chosen), source.config.model_type
        logger.warning(f"peft has no default target_modules for model_type {kind}: LoRA adapters are on {targets}")
    return specs


def specs_of(source: Source, label: str) -> list[LayerSpec]:
    """Specify the layers of ``source``."""
    loss, has_router = find_router_loss(source.skeleton, source.blocks, label)
    front, back = slice_layers(source, loss) if source.slices else _whole_ends(source, loss)
    specs = front
    first = source.outline.first_block
    if first == 2:
        specs.append(LayerSpec(PositionEmbedding, source.of(1), 1, source.skeleton.base_model.drop.p))
    for block in range(source.outline.num_blocks):
        for half in source.halves[block] if source.halves else (None,):
            specs.append(_decoder_layer(source, block, half, loss if has_router[block] else None))
    layer = first + source.outline.num_blocks
    return [*specs, LayerSpec(DecoderNorm, source.of(layer), layer), *back]


def _decoder_layer(source: Source, block: int, half: Half | None, loss: RouterLoss | None) -> LayerSpec:
    """Specify a decoder layer, or a half of it: one of them has the router, and the experts."""
    layer, experts = source.outline.first_block + block, source.experts[block]
    if half is not None:
        loss = loss if loss is not None and half.has(loss.router) else None
        experts = experts if experts is not None and half.has(experts.path) else None
    about = (source.of(layer), layer, block, loss, half)
    kinds: tuple[type[DecoderLayer], type[MoEDecoderLayer]] = DecoderLayer, MoEDecoderLayer
    settings: dict[str, Any] = {} if experts is None else {"experts": experts}
    if source.pruning is not None:
        kinds, settings["csr_from"] = (PrunableDecoderLayer, PrunableMoEDecoderLayer), source.pruning.csr_from
    return LayerSpec(kinds[experts is not None], *about, **settings)


def _whole_ends(source: Source, loss: RouterLoss | None) -> tuple[list[LayerSpec], list[LayerSpec]]:
    """Specify the embedding and the head, one layer each."""
    last = len(source.outline.paths) - 1
    if source.tied:
        tie = {"tied_weight_attr": f"{PART}weight", "tied": True}
        arguments = source.of(0), 0, loss
        # The head has the forward_fn: checkpoints hold the state of the tied layer that has none.
        return [TiedLayerSpec(TIE, InputEmbedding, *arguments, **tie)], [
            TiedLayerSpec(TIE, InputEmbedding, *arguments, forward_fn=tied_logits, **tie)
        ]
    return [LayerSpec(InputEmbedding, source.of(0), 0, loss)], [LayerSpec(LMHead, source.of(last), last, loss)]


def _specs_like(model: Any, trial: Trial) -> list[LayerSpec]:
    source = source_of(model, 0, inputs=trial.inputs, attn_implementation=trial.implementation)
    source = replace(
        source,
        has_input_transform=trial.has_input_transform,
        has_output_transform=trial.has_output_transform,
        slices=trial.slices,
        halves=trial.halves,
        pruning=PruningConfig() if trial.prunable else None,
    )
    return specs_of(source, name_of(model))


def source_of(
    model: Any,
    seed: int,
    *,
    weights: bool = True,
    parallel: bool = False,
    inputs: Sequence[str] = (),
    attn_implementation: str | None = None,
    peft: Any = None,
    untie: bool = False,
) -> Source:
    model, lora = split_off(model, peft)
    config, label = config_of(model), name_of(model)
    skeleton = _skeleton(config, label, attn_implementation)
    if isinstance(model, nn.Module):
        take_settings(skeleton, model, label)
    if untie:
        _untie(skeleton, label)
    outline = outline_of(skeleton, label)
    trainable: Mapping[str, bool] = {}
    tensors: Tensors | None = None
    if isinstance(model, nn.Module) and weights:
        tensors = InMemory(model.state_dict() if lora is None else base_tensors(model))
        trainable = {name: one.requires_grad for name, one in model.named_parameters(remove_duplicate=False)}
        if lora is None and not any(trainable.values()):
            raise ConfigError(f"{label}: none of its parameters has requires_grad: nothing would train")
    elif isinstance(model, (str, os.PathLike)) and Path(model).is_dir() and weights:
        tensors = Folder(Path(model))
    experts = find_experts(config, getattr(skeleton.base_model, outline.blocks), label, parallel=parallel)
    exact = _exact_buffers(skeleton, outline)
    stubbed = StubbedModel(skeleton, outline, seed)
    about = (skeleton, outline, stubbed, tuple(inputs), tensors, None, tuple(experts), seed, trainable, exact)
    source = Source(*about, untied=untie)
    if lora is not None:
        source = replace(source, adapters=_adapters(source, lora, label, weights=weights))
    if isinstance(tensors, Folder):
        return replace(source, stored_tensors=_stored_tensors(source, tensors))
    if isinstance(tensors, InMemory):
        check_tensors(tensors, tensors.shapes, _expected(source), sorted({*tensors.shapes} - {*skeleton.state_dict()}))
    return source


def _adapters(source: Source, lora: Lora, label: str, *, weights: bool) -> Adapters:
    """Make the adapters of ``source``, and refuse those that cannot be in one of its layers."""
    adapters, paths = adapters_in(source.skeleton, source.blocks, lora, label, weights=weights), source.outline.paths
    plain = [tuple(source.skeleton.get_submodule(path).state_dict()) for path in paths]
    changed = [tuple(adapters.part(path).state_dict()) != names for path, names in zip(paths, plain)]
    if source.tied and (changed[0] or changed[-1]):
        path = paths[0] if changed[0] else paths[-1]
        raise ConfigError(
            f"{label}: peft: {path} is a target, or in modules_to_save: it is one weight with "
            f"{paths[-1] if changed[0] else paths[0]} (tie_word_embeddings), a layer of both the first and the last "
            "stage: leave it out, or give the head its own copy (untie = true)"
        )
    own = adapters.own_names()
    for block, experts in enumerate(source.experts):
        if experts is not None and experts.parallel:
            inside = f"{paths[block + source.outline.first_block]}.{experts.path}"
            if any(name.startswith(f"{inside}.") for name in own):
                raise ConfigError(f"{label}: peft: {inside}: experts that replicas share cannot have adapters")
    return adapters


def _skeleton(config: Any, label: str, attn_implementation: str | None) -> Any:
    """Build transformers' model without memory."""
    if attn_implementation is not None and "/" in attn_implementation:
        raise ConfigError(f"attn_implementation {attn_implementation}: names code to be fetched, which is never run")
    with torch.device("meta"):
        try:
            auto = transformers().AutoModelForCausalLM
            if attn_implementation is None:
                attn_implementation = default_attention(auto._model_mapping[type(config)])
            return auto.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
        except Exception as error:  # transformers raises many kinds for sizes that do not fit
            raise ConfigError(f"{label}: transformers cannot build the model: {error}") from error


def _untie(skeleton: Any, label: str) -> None:
    """Let the head of transformers' model without memory have a weight of its own.

    Raises:
        ConfigError: it has one.
    """
    embedding, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        raise ConfigError(f"{label}: untie: its head and its embedding are two weights already: should be false")
    head.weight = nn.Parameter(torch.empty_like(head.weight), head.weight.requires_grad)
    skeleton.config.tie_word_embeddings = False


def _exact_buffers(skeleton: Any, outline: Outline) -> tuple[str, ...]:
    """List the buffers of layers that transformers keeps in fp32 in a bf16 model."""
    inside = tuple(f"{path}." for path in outline.paths)
    buffers = {name for name, one in skeleton.named_buffers() if one.is_floating_point() and name.startswith(inside)}
    if not buffers:
        return ()
    kept = skeleton._keep_in_fp32_modules_strict or ()
    with torch.device("meta"):
        config = copy.deepcopy(skeleton.config)
        twin = transformers().AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    dtypes = {name: one.dtype for name, one in twin.named_buffers()}
    return tuple(
        name for name in sorted(buffers) if dtypes[name] == torch.float32 or any(part in name for part in kept)
    )


def _stored_tensors(source: Source, tensors: Folder) -> dict[str, Stored]:
    """Find what the tensors of files make, and refuse those that are not the model's."""
    skeleton, expected = source.skeleton, _expected(source)
    stored, unknown = locate(skeleton, tensors.shapes)
    if source.tied or source.untied:
        _compare_ends(source, tensors, stored)
    made = made_shapes(skeleton, stored, tensors.shapes, tensors.label)
    ignored = skeleton._keys_to_ignore_on_load_unexpected or ()
    check_tensors(tensors, {name: shape for name, (_, shape) in made.items()}, expected, unknown, ignored)
    return {name: one for name, (one, _) in made.items() if name in expected}


def _compare_ends(source: Source, tensors: Folder, stored: dict[str, Stored]) -> None:
    """Let a head that gets a copy read the embedding's tensor.

    Raises:
        ConfigError: files have tensors for both, with other values: transformers does not tie them then.
    """
    embedding, head = ends = [f"{source.outline.paths[end]}.weight" for end in (0, -1)]
    if all(name in stored for name in ends):
        first, last = (stored[name].names[0] for name in ends)
        if not tensors.are_equal(first, last):
            raise ConfigError(
                f"{tensors.label}: {first} and {last} differ, and its config ties them: tie_word_embeddings should be "
                f"false{', untie too' if source.untied else ''}"
            )
    if source.untied and embedding in stored:
        stored[head] = replace(stored[embedding], target=head)


def _expected(source: Source) -> dict[str, tuple[int, ...]]:
    """List the shapes of all that the model has, by transformers' names."""
    outline = source.outline
    return {
        f"{outline.paths[layer]}.{name}": shape
        for layer in range(outline.num_layers)
        for name, shape in source.shapes(layer).items()
    }
