"""The model that a "model" block describes: which parts its layers are made of, and which cases change it."""

from __future__ import annotations

from typing import Any

from deepspeed.pipe import LayerSpec

from ds_dynmo.errors import ConfigError
from ds_dynmo.models import huggingface
from ds_dynmo.models.case import DynamicCase
from ds_dynmo.models.config import BLOCK, BYTES, ModelConfig
from ds_dynmo.models.freezing import Freezing
from ds_dynmo.models.gpt import Block, gpt_layers

__all__ = ["dynamic_cases", "model_layers"]


def model_layers(config: ModelConfig) -> list[LayerSpec]:
    """The layer list for a ``PipelineModule``.

    Raises:
        ConfigError: what "huggingface" names cannot be had; nothing has been built.
    """
    if config.huggingface is not None:
        try:
            return huggingface.layers(
                config.huggingface,
                seed=config.seed,
                sequence_length=config.sequence_length,
                vocab_size=BYTES,
            )
        except ConfigError as error:
            raise ConfigError(f"{BLOCK}.huggingface: {error}") from error
    return gpt_layers(config, [LayerSpec(Block, config, layer) for layer in range(1, config.layers + 1)])


def dynamic_cases(config: ModelConfig, engine: Any, *, total_steps: int) -> list[DynamicCase]:
    """What has to be called between batches; empty for a model that changes by itself or not at all.

    Args:
        engine: what :func:`ds_dynmo.initialize` gave for :func:`model_layers` of the same ``config``.
        total_steps: of the run: schedules are fractions of it.
    """
    cases: list[DynamicCase] = []
    if config.freezing is not None:
        cases.append(Freezing(config.freezing, engine, num_blocks=config.layers, total_steps=total_steps))
    return cases
