"""Compare a family's layers with transformers' model, on a tiny model with random weights.

The declared parts of a model do not say what else its ``forward`` does: scale embeddings or logits, hand values from
layer to layer. So it is tried, with the config's own settings, before anything is built: a model whose layers give
other logits, another loss or other gradients is refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec

from ds_dynmo.errors import ConfigError, PackingError
from ds_dynmo.models.huggingface.comparison import (
    compare,
    compare_documents,
    compare_parameters,
    compare_slices,
    compare_tied,
)
from ds_dynmo.models.huggingface.configs import default_attention
from ds_dynmo.models.huggingface.halves import Halves, check_has_all, cut_decoder_layers
from ds_dynmo.models.huggingface.moe import can_share
from ds_dynmo.models.huggingface.outline import outline_of
from ds_dynmo.models.huggingface.source import Source
from ds_dynmo.models.huggingface.tiny import count_kinds, first_of_kind, tiny_config
from ds_dynmo.models.huggingface.trial import BuiltLayers, MultipliedDropout, random_model, trial_batches
from ds_dynmo.models.pruning.prunable_layer import prunable_linears
from ds_dynmo.torch_private import default_store

__all__ = ["Trial", "find_halves", "find_transforms", "verify"]

ON_CPU = ("sdpa", "eager")  # implementations of attention; others are kernels of accelerators

SLICES = 3  # of a tiny vocabulary, which they do not divide
_PATIENCE = timedelta(minutes=10)  # with the rank that compares, which takes a second or a few
_MORE = "is more than its declared parts"
_NO_TINY = "cannot be verified by a tiny model of its config"
_REMEDY = "verified=False trusts the parts that transformers declares"


@dataclass(frozen=True)
class Trial:
    """What layers are made of for a comparison, beside their model.

    Attributes:
        inputs, has_input_transform, has_output_transform: see :class:`~ds_dynmo.models.huggingface.source.Source`.
        implementation: of attention, one that runs on a CPU.
        fresh: whether weights are drawn.
        parallel: whether experts are distributed over the replicas.
        slices: of the vocabulary; 0: it is whole.
        halves: of the tiny model's decoder layers; empty: they are whole.
        prunable: whether linear layers can be pruned.
        untied: whether the model's head is to have a copy of the embedding's weights.
    """

    inputs: tuple[str, ...]
    implementation: str
    has_input_transform: bool
    has_output_transform: bool
    fresh: bool = False
    parallel: bool = False
    slices: int = 0
    halves: tuple[Halves, ...] = ()
    prunable: bool = False
    untied: bool = False


# Makes the layers of a model, or config, of transformers.
MakeSpecs = Callable[[Any, Trial], list[LayerSpec]]


def find_transforms(source: Source, label: str) -> Source:
    """Find out whether transformers' model computes something before its decoder layers, and around its head.

    Raises:
        ConfigError: it cannot be called so.
    """
    width = source.skeleton.get_input_embeddings().weight.shape[1]
    hidden, logits = torch.ones(1, 2, width), torch.ones(1, 2, source.config.vocab_size)
    seen: list[torch.Tensor] = []

    def head(given: torch.Tensor) -> torch.Tensor:
        seen.append(given)
        return logits

    try:
        with torch.random.fork_rng(devices=[]):
            entered = source.stubbed.enter(hidden, {}, training=True)
            exited = source.stubbed.logits(hidden, head)
    except Exception as error:  # what transformers' models raise is not known
        kind = source.config.model_type
        raise ConfigError(f"{label}: model_type {kind} cannot be run in parts: {_said(error)}") from error
    plain_head = exited is logits and len(seen) == 1 and seen[0].data_ptr() == hidden.data_ptr()
    positions_are_a_layer = source.outline.first_block > 1
    return replace(
        source,
        has_input_transform=entered is not hidden and not positions_are_a_layer,
        has_output_transform=not plain_head,
    )


def verify(source: Source, label: str, make_specs: MakeSpecs) -> None:
    """Refuse a model whose layers do not compute what transformers' model does.

    Args:
        make_specs: makes the layers of another model as those of ``source`` are made.

    Raises:
        PackingError: layers are to tell documents apart by ``position_ids`` alone, and do not.
        ConfigError: with the difference, or because no tiny model can be made.
    """
    kind, tiny, implementation = source.config.model_type, _tiny(source, label), _implementation(source)
    trial = Trial(
        *(source.inputs, implementation, source.has_input_transform, source.has_output_transform),
        fresh=source.tensors is None,
        parallel=any(one is not None and one.parallel for one in source.experts),
        slices=SLICES if source.slices else 0,
        halves=_cut_once(tiny, implementation) if source.halves else (),
        prunable=source.pruning is not None,
        untied=source.untied,
    )
    result = _compare_once(tiny, count_kinds(source.blocks), trial, make_specs)
    if result.said:
        raise (PackingError if result.is_packing else ConfigError)(f"{label}: model_type {kind} {result.said}")


def find_halves(source: Source, label: str) -> Source:
    """Find out where the decoder layers can be cut in halves, on a tiny model.

    Raises:
        ConfigError: one cannot be cut, or no tiny model can be made.
    """
    tiny, kind = _tiny(source, label), source.config.model_type
    try:
        cuts = _cut_once(tiny, _implementation(source))
        halves = tuple(cuts[first] for first in first_of_kind(source.blocks))
        for block, cut in zip(source.blocks, halves):
            check_has_all(cut, block)
    except Exception as cause:  # transformers' models raise many kinds
        said = str(cause) if isinstance(cause, ValueError) else _said(cause)
        raise ConfigError(f"{label}: model_type {kind}: split_blocks: {said}: should be false") from cause
    return replace(source, halves=halves)


@lru_cache(maxsize=32)
def _cut_once(tiny: str, implementation: str) -> tuple[Halves, ...]:
    with torch.device("cpu"), torch.inference_mode(False), MultipliedDropout():
        model = random_model(json.loads(tiny), implementation).eval()
        tokens, _ = next(trial_batches(model.config.vocab_size, ()))
        blocks = getattr(model.base_model, outline_of(model, "the tiny model").blocks)
        return cut_decoder_layers(model, blocks, tokens)


def _tiny(source: Source, label: str) -> str:
    """Return the config of a tiny model, as JSON."""
    try:
        return json.dumps(tiny_config(source.config, source.blocks), sort_keys=True)
    except Exception as cause:  # transformers raises many kinds for sizes that do not fit
        kind = source.config.model_type
        raise ConfigError(f"{label}: model_type {kind} {_NO_TINY}: {_said(cause)}; {_REMEDY}") from cause


def _implementation(source: Source) -> str:
    """Name an implementation of attention that runs on a CPU, the model's own if it does."""
    implementation: str = source.config._attn_implementation
    return implementation if implementation in ON_CPU else default_attention(type(source.skeleton))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class ComparisonResult:
    """Why the layers of a model cannot be trusted.

    Attributes:
        said: goes on a message that names the model; empty: they can.
        is_packing: whether only packed documents differ.
    """

    said: str = ""
    is_packing: bool = False


@lru_cache(maxsize=32)
def _compare_once(tiny: str, kinds: int, trial: Trial, make_specs: MakeSpecs) -> ComparisonResult:
    """Compare on one rank of the launch; others take its result. Without a process group, each process compares."""
    store = default_store() if dist.is_initialized() else None
    if store is None:
        return _compare(tiny, kinds, trial, make_specs)
    key = f"ds_dynmo/verified/{sha256(repr((tiny, kinds, trial)).encode()).hexdigest()}"
    if store.add(f"{key}/ranks", 1) == 1:
        store.set(key, json.dumps(asdict(_compare(tiny, kinds, trial, make_specs))))
    store.wait([key], _PATIENCE)
    return ComparisonResult(**json.loads(store.get(key)))


def _compare(tiny: str, kinds: int, trial: Trial, make_specs: MakeSpecs) -> ComparisonResult:
    """Compare the layers of a tiny model with transformers'."""
    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        try:
            model = random_model(json.loads(tiny), trial.implementation)
            found = count_kinds(getattr(model.base_model, outline_of(model, "the tiny model").blocks))
            if found < kinds:
                raise ValueError(f"it has {found} kinds of layers, the model has {kinds}")
            for tokens, beside in trial_batches(model.config.vocab_size, trial.inputs):
                with torch.no_grad():
                    model(tokens, use_cache=False, **beside)
        except Exception as error:  # transformers raises many kinds for sizes that do not fit
            return ComparisonResult(f"{_NO_TINY}: {_said(error)}; {_REMEDY}")
        try:
            result = _compare_layers(model, trial, make_specs)
        except Exception as error:  # what transformers' models raise is not known
            result = ComparisonResult(f"{_MORE}: the layers of a tiny model fail: {_said(error)}")
    return replace(result, said=f"with {trial.implementation} attention {result.said}") if result.said else result


def _compare_layers(model: Any, trial: Trial, make_specs: MakeSpecs) -> ComparisonResult:
    """Compare the layers of a tiny ``model`` with it, and try what only some runs ask for."""
    vocabulary, blocks = model.config.vocab_size, getattr(model.base_model, outline_of(model, "the tiny model").blocks)
    whole = replace(trial, slices=0, halves=(), prunable=False)
    said = compare_parameters(model, BuiltLayers(make_specs(model.config, whole))) if trial.fresh else ""
    layers = BuiltLayers(make_specs(model, whole))
    layers.separate()
    said = said or compare(model, layers, trial.inputs)
    if trial.slices and not said:
        sliced = BuiltLayers(make_specs(model, replace(whole, slices=trial.slices)))
        said = compare_slices(layers, sliced, trial.inputs, vocabulary)
    if said:
        return ComparisonResult(f"{_MORE}: {said}")
    if trial.halves and (said := _compare_halves(model, trial, make_specs)):
        return ComparisonResult(f"cannot have split_blocks: {said}")
    if trial.prunable and (said := _compare_pruned(model, make_specs, replace(whole, prunable=True))):
        return ComparisonResult(f"cannot be pruned: {said}")
    if trial.inputs == ("position_ids",) and (said := compare_documents(layers, vocabulary)):
        return ComparisonResult(f"{_MORE}: {said}", is_packing=True)
    if trial.parallel and not can_share(model, blocks):
        return ComparisonResult("cannot have expert_parallel: its experts give other results where replicas share them")
    if trial.untied:
        tied = random_model({**model.config.to_dict(), "tie_word_embeddings": True}, trial.implementation)
        if said := compare_tied(model, tied):
            return ComparisonResult(f"cannot have untie: {said}")
    return ComparisonResult()


def _compare_halves(model: Any, trial: Trial, make_specs: MakeSpecs) -> str:
    """Describe how a tiny model differs from layers that are halves of its decoder layers; empty: not at all."""
    halves = BuiltLayers(make_specs(model, replace(trial, slices=0, prunable=False)))
    halves.separate()
    with MultipliedDropout():
        return compare(model, halves, trial.inputs)


def _compare_pruned(model: Any, make_specs: MakeSpecs, trial: Trial) -> str:
    """Describe how a tiny model with zeros differs from layers whose weights are vectors of the others; empty: not."""
    layers, zeroed = BuiltLayers(make_specs(model, trial)), copy.deepcopy(model)
    weights = {id(weight): name for name, weight in layers.named_weights(model).items()}
    for linear in prunable_linears(layers):
        weight = zeroed.get_parameter(weights[id(linear.weight)])
        linear.prune(linear.weight.abs() > linear.weight.abs().median())
        weight.data = linear.weight.detach().clone()
        linear.compress()
    try:
        return compare(zeroed, layers, trial.inputs, gradients=False)
    except Exception as error:  # what transformers' models raise is not known
        return f"its linear layers are used in another way than called: {_said(error)}"
