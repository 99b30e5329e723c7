"""The model that a "model" block describes: which parts its layers are made of, and which cases change it."""

from __future__ import annotations

from functools import partial
from typing import Any

from deepspeed.pipe import LayerSpec

from ds_dynmo.models.case import DynamicCase
from ds_dynmo.models.config import ModelConfig
from ds_dynmo.models.egeria import Egeria
from ds_dynmo.models.freezing import Freezing
from ds_dynmo.models.gpt import Block, gpt_layers
from ds_dynmo.models.moe import ExpertBalance, MixtureOfExperts
from ds_dynmo.models.routing import moe_blocks
from ds_dynmo.models.pruning import PrunableBlock, Pruning
from ds_dynmo.models.sparse_attention import HashSparseAttention, QKSparseAttention
from ds_dynmo.models.mixture_of_depths import MixtureOfDepthsBlock

__all__ = ["dynamic_cases", "model_layers"]


SPARSE_ATTENTION = {"hash": HashSparseAttention, "qk": QKSparseAttention}


def model_layers(config: ModelConfig) -> list[LayerSpec]:
    """The layer list for a ``PipelineModule``."""
    parts: list[dict[str, Any]] = [{} for _ in range(config.layers)]
    if config.moe is not None:
        for block in moe_blocks(config.moe, config.layers):
            parts[block]["mlp"] = partial(MixtureOfExperts, moe=config.moe)
    return gpt_layers(config, [LayerSpec(Block, config, layer, **part) for layer, part in enumerate(parts, start=1)])
    return gpt_layers(config, [_block(config, layer) for layer in range(1, config.layers + 1)])


def _block(config: ModelConfig, layer: int) -> LayerSpec:
    if config.pruning is not None:
        return LayerSpec(PrunableBlock, config, layer, csr_from=config.pruning.csr_from)
    return LayerSpec(Block, config, layer)
    attention = None if config.sparse_attention is None else SPARSE_ATTENTION[config.sparse_attention.kind]
    blocks = [LayerSpec(Block, config, layer, attention=attention) for layer in range(1, config.layers + 1)]
    return gpt_layers(config, blocks)
    if config.mod is not None and config.mod.routes(layer):
        return LayerSpec(MixtureOfDepthsBlock, config, layer, config.mod)
    return LayerSpec(Block, config, layer)


def dynamic_cases(config: ModelConfig, engine: Any, *, total_steps: int) -> list[DynamicCase]:
    """What has to be called between batches; empty for a model that changes by itself or not at all.

    Args:
        engine: what :func:`ds_dynmo.initialize` gave for :func:`model_layers` of the same ``config``.
        total_steps: of the run: schedules are fractions of it.
    """
    cases: list[DynamicCase] = []
    if config.freezing is not None and config.freezing.egeria is not None:
        cases.append(Egeria(config.freezing.egeria, engine, num_blocks=config.layers, total_steps=total_steps))
    elif config.freezing is not None:
        cases.append(Freezing(config.freezing, engine, num_blocks=config.layers, total_steps=total_steps))
    if config.moe is not None:
        cases.append(ExpertBalance(config.moe, engine, num_layers=len(model_layers(config))))
    if config.pruning is not None:
        num_layers = len(model_layers(config))
        cases.append(Pruning(config.pruning, engine, num_layers=num_layers, total_steps=total_steps))
    return cases
