"""Build the model that a "model" block describes, and the dynamic cases that change it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec

from ds_dynmo.engine.deepspeed.module import layer_specs
from ds_dynmo.errors import ConfigError, PackingError
from ds_dynmo.models import huggingface
from ds_dynmo.models.case import DynamicCase
from ds_dynmo.models.config import BLOCK, BYTES, ModelConfig
from ds_dynmo.models.early_exit.exits import EarlyExit, exit_layers
from ds_dynmo.models.freezing.egeria import Egeria
from ds_dynmo.models.freezing.prefix import Freezing
from ds_dynmo.models.gpt import AttentionHalf, Block, FeedForwardHalf, gpt_layers
from ds_dynmo.models.huggingface.configs import config_of
from ds_dynmo.models.local_layers import block_numbers
from ds_dynmo.models.mixture_of_depths import MixtureOfDepths, MixtureOfDepthsBlock
from ds_dynmo.models.moe.layer import ExpertBalance, MixtureOfExperts
from ds_dynmo.models.moe.routing import moe_blocks
from ds_dynmo.models.pruning.gradual import (
    PrunableAttentionHalf,
    PrunableBlock,
    PrunableFeedForwardHalf,
    Pruning,
)
from ds_dynmo.models.sparse_attention.attention import HashSparseAttention, QKSparseAttention
from ds_dynmo.models.transformer import DocumentAttention

__all__ = ["dynamic_cases", "model_layers", "vocabulary_of"]

NOT_PACKED = ("sparse_attention", "mod", "early_exit")
SPARSE_ATTENTION = {"hash": HashSparseAttention, "qk": QKSparseAttention}


def model_layers(config: ModelConfig, *, packed: bool = False) -> list[LayerSpec]:
    """Build the layer list for a ``PipelineModule``.

    Args:
        packed: inputs are (token numbers, positions); a document begins at position 0, and attention does not cross it.

    Raises:
        PackingError: the model attends across packed documents.
        ConfigError: the model that "huggingface" names cannot be loaded; nothing has been built.
    """
    if config.huggingface is not None:
        return _huggingface_layers(config, packed=packed)
    for key in NOT_PACKED:
        if packed and getattr(config, key) is not None:
            raise PackingError(f"{BLOCK}.{key}: cannot be combined with packed documents: it attends across them")
    if config.early_exit is not None:
        return exit_layers(config, config.early_exit)
    return gpt_layers(config, [spec for layer in range(1, config.layers + 1) for spec in _block(config, layer, packed)])


def vocabulary_of(config: ModelConfig) -> int:
    """Give the number of different tokens that the model knows.

    Raises:
        ConfigError: the model that "huggingface" names cannot be loaded.
    """
    if config.huggingface is None:
        return config.vocab_size
    try:
        return int(config_of(config.huggingface).vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{BLOCK}.huggingface: {error}") from error


def _huggingface_layers(config: ModelConfig, *, packed: bool) -> list[LayerSpec]:
    assert config.huggingface is not None
    is_folder = isinstance(config.huggingface, str) and Path(config.huggingface).is_dir()
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
        )
        if config.freezing is not None and config.freezing.egeria is not None:
            huggingface.check_blocks_draw_nothing(config.huggingface, "freezing.egeria runs blocks beside the training")
    except ConfigError as error:
        raise type(error)(f"{BLOCK}.huggingface: {error}") from error
    if config.freezing is not None:
        if any(isinstance(spec, TiedLayerSpec) for spec in layers):
            raise ConfigError(
                f"{BLOCK}.freezing: would freeze the head with the embedding: needs tie_word_embeddings = false in "
                f"{BLOCK}.huggingface"
            )
        most, blocks = config.freezing.most_blocks, len(block_numbers(layers))
        if most > blocks:
            raise ConfigError(f"{BLOCK}.freezing: schedule freezes {most} blocks, {BLOCK}.huggingface has {blocks}")
    return layers


def _block(config: ModelConfig, layer: int, packed: bool) -> list[LayerSpec]:
    """Specify block ``layer``, counted from 1: one layer of the list, or one for each half."""
    attention: Any = DocumentAttention if packed else None
    if config.sparse_attention is not None:
        attention = SPARSE_ATTENTION[config.sparse_attention.kind]
    mlp = None
    if config.moe is not None and layer - 1 in moe_blocks(config.moe, config.layers):
        mlp = partial(MixtureOfExperts, moe=config.moe)
    both: dict[str, Any] = {"attention": attention, "mlp": mlp}
    if config.mod is not None and config.mod.routes(layer):
        return [LayerSpec(MixtureOfDepthsBlock, config, layer, config.mod, **both)]
    prunable: dict[str, Any] = {}
    if config.pruning is not None:
        prunable = {"csr_from": config.pruning.csr_from}
    if not config.split_blocks:
        return [LayerSpec(PrunableBlock if prunable else Block, config, layer, **both, **prunable)]
    return [
        LayerSpec(PrunableAttentionHalf if prunable else AttentionHalf, config, layer, attention=attention, **prunable),
        LayerSpec(PrunableFeedForwardHalf if prunable else FeedForwardHalf, config, layer, **both, **prunable),
    ]


def dynamic_cases(config: ModelConfig, engine: Any, *, total_steps: int) -> list[DynamicCase]:
    """Build what is called between batches; empty for a model that changes by itself or not at all.

    Args:
        engine: what :func:`ds_dynmo.initialize` gave for :func:`model_layers` of the same ``config``.
        total_steps: of the run: schedules are fractions of it.
    """
    cases: list[DynamicCase] = []
    layers = layer_specs(engine.module)
    num_layers, blocks = len(layers), block_numbers(layers)
    if config.pruning is not None:  # first, so that the others see no gradients of what is pruned
        cases.append(Pruning(config.pruning, engine, num_layers=num_layers, total_steps=total_steps))
    if config.freezing is not None and config.freezing.egeria is not None:
        cases.append(Egeria(config.freezing.egeria, engine, blocks=blocks, total_steps=total_steps))
    elif config.freezing is not None:
        cases.append(
            Freezing(
                config.freezing,
                engine,
                blocks=blocks,
                num_layers=num_layers,
                layers_per_block=config.layers_per_block,
                total_steps=total_steps,
            )
        )
    if config.moe is not None:
        cases.append(ExpertBalance(config.moe, engine, num_layers=num_layers))
    if config.mod is not None and config.mod.schedule is not None:
        cases.append(MixtureOfDepths(config.mod, engine, total_steps=total_steps))
    if config.early_exit is not None:
        cases.append(EarlyExit(config.early_exit, engine, total_steps=total_steps))
    return cases
