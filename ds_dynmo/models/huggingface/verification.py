"""Compare a family's layers with the library's model, on a tiny model with random weights.

The declared parts of a model do not say what else its ``forward`` does: scale embeddings or logits, hand values from
layer to layer. So it is tried, with the config's own settings, before anything is built: a model whose layers give
other logits, another loss or other gradients is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from deepspeed.pipe import LayerSpec

from ds_dynmo.errors import ConfigError, PackingError
from ds_dynmo.models.huggingface.comparison import compare, compare_documents, compare_parameters
from ds_dynmo.models.huggingface.configs import default_attention
from ds_dynmo.models.huggingface.moe import can_share
from ds_dynmo.models.huggingface.source import Source, outline_of
from ds_dynmo.models.huggingface.tiny import count_kinds, tiny_config
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model, trial_batches

__all__ = ["Trial", "find_surroundings", "verify"]

ON_CPU = ("sdpa", "eager")  # implementations of attention; others are kernels of accelerators


@dataclass(frozen=True)
class Trial:
    """What layers are made of for a comparison, beside their model.

    Attributes:
        inputs, has_entry, has_exit: see :class:`~ds_dynmo.models.huggingface.source.Source`.
        implementation: of attention, one that runs on a CPU.
        fresh: are weights drawn?
        parallel: do replicas share the experts?
    """

    inputs: tuple[str, ...]
    implementation: str
    has_entry: bool
    has_exit: bool
    fresh: bool = False
    parallel: bool = False


# Makes the layers of a model, or config, of the library's.
MakeSpecs = Callable[[Any, Trial], list[LayerSpec]]


def find_surroundings(source: Source, place: str) -> Source:
    """Find out what the library's model computes beside its parts, by calling it around stand-ins.

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
            around = source.around(0, trains=True).train()
            entered, exited = around.enter(hidden, {}), around.logits(hidden, head)
    except Exception as error:  # what the library's models raise is not known
        kind = source.config.model_type
        raise ConfigError(f"{place}: model_type {kind} cannot be run in parts: {_said(error)}") from error
    plain_head = exited is logits and len(seen) == 1 and seen[0].data_ptr() == hidden.data_ptr()
    positions_are_a_layer = source.outline.first_block > 1
    return replace(source, has_entry=entered is not hidden and not positions_are_a_layer, has_exit=not plain_head)


def verify(source: Source, place: str, make_specs: MakeSpecs) -> None:
    """Refuse a model whose layers do not compute what the library's model does.

    Args:
        make_specs: makes the layers of another model as those of ``source`` are made.

    Raises:
        PackingError: layers are to tell documents apart by ``position_ids`` alone, and do not.
        ConfigError: with the difference, or because no tiny model can be made.
    """
    config = source.config
    kind, implementation = config.model_type, config._attn_implementation
    if implementation not in ON_CPU:
        implementation = default_attention(type(source.skeleton))
    trial = Trial(
        *(source.inputs, implementation, source.has_entry, source.has_exit),
        fresh=source.tensors is None,
        parallel=any(one is not None and one.parallel for one in source.experts),
    )
    try:
        tiny = json.dumps(tiny_config(config, source.blocks), sort_keys=True)
        error, said = _compare(tiny, count_kinds(source.blocks), trial, make_specs)
    except Exception as cause:  # the library raises many kinds for sizes that do not fit
        raise ConfigError(
            f"{place}: model_type {kind} cannot be verified by a tiny model of its config: {_said(cause)}; "
            "verified=False trusts the parts that transformers declares"
        ) from cause
    if said:
        raise error(f"{place}: model_type {kind} with {implementation} attention {said}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=32)
def _compare(tiny: str, kinds: int, trial: Trial, make_specs: MakeSpecs) -> tuple[type[ConfigError], str]:
    """Say why the layers of a tiny model cannot be trusted, and by which error; empty: they can."""
    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        model = random_model(json.loads(tiny), trial.implementation)
        blocks = getattr(model.base_model, outline_of(model, "the tiny model").blocks)
        if count_kinds(blocks) < kinds:
            raise ValueError(f"it has {count_kinds(blocks)} kinds of layers, the model has {kinds}")
        for tokens, beside in trial_batches(model.config.vocab_size, trial.inputs):
            with torch.no_grad():
                model(tokens, use_cache=False, **beside)
        try:
            said = compare_parameters(model, BuiltLayers(make_specs(model.config, trial))) if trial.fresh else ""
            layers = BuiltLayers(make_specs(model, trial))
            said = said or compare(model, layers, trial.inputs)
            if said:
                return ConfigError, f"is more than its declared parts: {said}"
            if trial.inputs == ("position_ids",) and (said := compare_documents(layers, model.config.vocab_size)):
                return PackingError, f"is more than its declared parts: {said}"
            if trial.parallel and not can_share(model, blocks):
                return ConfigError, (
                    "cannot have expert_parallel: its experts give other results where replicas share them"
                )
        except Exception as error:  # what the library's models raise is not known
            return ConfigError, f"is more than its declared parts: the layers of a tiny model fail: {_said(error)}"
    return ConfigError, ""
