"""Build the model that a "model" section describes, and the dynamic cases that change it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec

from ds_dynmo.engine.deepspeed.module import layer_specs
from ds_dynmo.errors import ConfigError, PackingError
from ds_dynmo.models import huggingface
from ds_dynmo.models.case import DynamicCase, RunSizes
from ds_dynmo.models.config import BYTES, SECTION, ModelConfig
from ds_dynmo.models.early_exit.exits import EarlyExit, exit_layers
from ds_dynmo.models.freezing.config import FreezingConfig
from ds_dynmo.models.freezing.egeria import Egeria
from ds_dynmo.models.freezing.freezing import Freezing
from ds_dynmo.models.gpt import DocumentAttention, gpt_layers
from ds_dynmo.models.half_blocks import block_layers
from ds_dynmo.models.huggingface.configs import config_of
from ds_dynmo.models.layer_numbers import block_numbers
from ds_dynmo.models.mixture_of_depths.block import routed_block
from ds_dynmo.models.moe.layer import RouterBiasUpdate, expert_parts
from ds_dynmo.models.pruning.config import PruningConfig
from ds_dynmo.models.pruning.gradual import Pruning, prunable_block
from ds_dynmo.models.sparse_attention.attention import attention_parts
from ds_dynmo.models.vocabulary_slices import slice_layers

__all__ = ["dynamic_cases", "model_layers", "vocabulary_of"]

# What each kind of case contributes. A kind that is not in a table leaves that part of the model as it is. Cases that
# cannot share a table refuse each other (CaseConfig.apart_from): at most one case builds the whole model, and at most
# one builds a block. Parts of a block come from several cases, as they have different names.

# Value: function(model, case) that returns the whole layer list.
WHOLE_MODEL_BUILDERS: dict[str, Callable[[ModelConfig, Any], list[LayerSpec]]] = {"early_exit": exit_layers}

# Value: function(model, case, block_number) that returns parts of a block, counted from 1: "attention" and "mlp", which
# are arguments of Block.
BLOCK_PART_BUILDERS: dict[str, Callable[[ModelConfig, Any, int], dict[str, Any]]] = {
    "moe": expert_parts,
    "sparse_attention": attention_parts,
}

# Value: function(model, case, block_number, parts) that returns the block's layers; None: those of the plain GPT.
BLOCK_BUILDERS: dict[str, Callable[[ModelConfig, Any, int, dict[str, Any]], list[LayerSpec] | None]] = {
    "mod": routed_block,
    "pruning": prunable_block,
}


def _freezing(config: FreezingConfig, engine: Any, sizes: RunSizes) -> DynamicCase:
    return Freezing(config, engine, sizes) if config.egeria is None else Egeria(config.egeria, engine, sizes)


# Value: function(case, engine, sizes) that returns the object to call between batches, in this order; None: nothing.
DYNAMIC_CASE_BUILDERS: dict[str, Callable[[Any, Any, RunSizes], DynamicCase | None]] = {
    "pruning": Pruning,  # first, so that the others see no gradients of pruned weights
    "freezing": _freezing,
    "moe": RouterBiasUpdate,
    "early_exit": EarlyExit,
}


def model_layers(config: ModelConfig, *, packed: bool = False) -> list[LayerSpec]:
    """Build the layer list for a ``PipelineModule``.

    Args:
        packed: inputs are (token numbers, positions); a document begins at position 0, and attention does not cross it.
            Labels follow them if the vocabulary is in slices: see :func:`~ds_dynmo.models.with_labels`.

    Raises:
        PackingError: the model attends across packed documents.
        ConfigError: the model that "huggingface" names cannot be loaded; nothing has been built.
    """
    if config.huggingface is not None:
        return _huggingface_layers(config, packed=packed)
    for case in config.case:
        if packed and case.crosses_documents:
            raise PackingError(
                f"{SECTION}.case: {case.kind} cannot be combined with packed documents: it attends across them"
            )
    whole = [case for case in config.case if case.kind in WHOLE_MODEL_BUILDERS]
    assert len(whole) <= 1, "cases that build the whole model refuse each other"
    for case in whole:
        return WHOLE_MODEL_BUILDERS[case.kind](config, case)
    blocks = [_block(config, block_number, packed) for block_number in range(1, config.layers + 1)]
    ends = slice_layers(config, packed=packed) if config.num_vocabulary_slices else None
    return gpt_layers(config, [layer for block in blocks for layer in block], ends)


def _block(config: ModelConfig, block_number: int, packed: bool) -> list[LayerSpec]:
    """Specify block ``block_number``, counted from 1: one layer of the list, or one for each half."""
    parts: dict[str, Any] = {"attention": DocumentAttention} if packed else {}
    for case in config.case:
        if case.kind in BLOCK_PART_BUILDERS:
            parts |= BLOCK_PART_BUILDERS[case.kind](config, case, block_number)
    builders = [case for case in config.case if case.kind in BLOCK_BUILDERS]
    assert len(builders) <= 1, "cases that build a block refuse each other"
    for case in builders:
        layers = BLOCK_BUILDERS[case.kind](config, case, block_number, parts)
        if layers is not None:
            return layers
    return block_layers(config, block_number, **parts)


def dynamic_cases(config: ModelConfig, engine: Any, *, total_steps: int) -> list[DynamicCase]:
    """Build the objects to call between batches; none for a model that changes by itself or not at all.

    Args:
        engine: returned by :func:`ds_dynmo.initialize` for :func:`model_layers` of the same ``config``.
        total_steps: of the run: schedules are fractions of it.
    """
    layers = layer_specs(engine.module)
    sizes = RunSizes(
        total_steps=total_steps,
        num_layers=len(layers),
        blocks=block_numbers(layers),
        layers_per_block=config.layers_per_block,
    )
    by_kind = {case.kind: case for case in config.case}
    cases = [build(by_kind[kind], engine, sizes) for kind, build in DYNAMIC_CASE_BUILDERS.items() if kind in by_kind]
    return [case for case in cases if case is not None]


def vocabulary_of(config: ModelConfig) -> int:
    """Return the number of different tokens that the model knows.

    Raises:
        ConfigError: the model that "huggingface" names cannot be loaded.
    """
    if config.huggingface is None:
        return config.vocab_size
    try:
        return int(config_of(config.huggingface).vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{SECTION}.huggingface: {error}") from error


def _huggingface_layers(config: ModelConfig, *, packed: bool) -> list[LayerSpec]:
    assert config.huggingface is not None
    is_folder = isinstance(config.huggingface, str) and Path(config.huggingface).is_dir()
    freezing = config.find_case(FreezingConfig)
    try:
        layers = huggingface.layers(
            config.huggingface,
            seed=config.seed,
            sequence_length=config.sequence_length,
            vocab_size=None if is_folder and config.tokens is None else BYTES,  # a folder's tokens are its own
            expert_parallel=config.expert_parallel,
            inputs=("position_ids",) if packed else (),
            verified=config.verified,
            peft=config.peft,
            vocabulary_slices=config.vocabulary_slices,
            split_blocks=config.split_blocks,
            pruning=config.find_case(PruningConfig),
            untie=config.untie,
        )
        if freezing is not None and freezing.egeria is not None:
            huggingface.check_blocks_draw_nothing(config.huggingface, "egeria runs blocks beside the training")
    except ConfigError as error:
        raise type(error)(f"{SECTION}.huggingface: {error}") from error
    if freezing is not None:
        _check_freezing(freezing, layers, config.layers_per_block)
    return layers


def _check_freezing(freezing: FreezingConfig, layers: list[LayerSpec], layers_per_block: int) -> None:
    """Check that layers of a Hugging Face model can be frozen, as ``FreezingConfig.check`` does for the GPT's."""
    if any(isinstance(spec, TiedLayerSpec) for spec in layers):
        raise ConfigError(f"{SECTION}.case: would freeze the head with the embedding: needs {SECTION}.untie = true")
    most, blocks = freezing.most_blocks, len(block_numbers(layers)) // layers_per_block
    if most > blocks:
        raise ConfigError(f"{SECTION}.case: schedule freezes {most} blocks, {SECTION}.huggingface has {blocks}")
