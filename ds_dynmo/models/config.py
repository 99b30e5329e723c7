"""The "model" block of the DeepSpeed JSON: the GPT's sizes and the dynamic case."""

from __future__ import annotations

import difflib
import os
from typing import Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from ds_dynmo.config import load_json, parse_block
from ds_dynmo.errors import ConfigError
from ds_dynmo.models.freezing import FreezingConfig
from ds_dynmo.models.gpt import GPTConfig

__all__ = ["ModelConfig", "read_model_config"]

BLOCK = "model"
BYTES = 256  # the text's different tokens
BESIDE_HUGGINGFACE = {"huggingface", "sequence_length", "seed"}


class ModelConfig(GPTConfig):
    """The "model" block. Steps are given as fractions of the run's steps."""

    vocab_size: int = Field(default=BYTES, ge=BYTES, description="at least 256, the text is bytes")
    freezing: FreezingConfig | None = Field(default=None, description="freezes the front of the model; null: nothing")

    huggingface: str | dict[str, Any] | None = Field(
        default=None,
        description="a folder with config.json and safetensors files, or for fresh weights the path of a config.json, "
        'or what is in one; beside it "sequence_length" and "seed" alone may be given',
    )

    @model_validator(mode="after")
    def _sizes_are_huggingfaces(self) -> ModelConfig:
        others = sorted(self.model_fields_set - BESIDE_HUGGINGFACE)
        if self.huggingface is not None and others:
            raise ValueError(
                f"{', '.join(others)}: cannot be given beside huggingface, whose config says what the model is"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_what_does_not_count(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        if self.huggingface is None:
            return dumped
        return {key: value for key, value in dumped.items() if key in BESIDE_HUGGINGFACE}

    @field_validator("freezing")
    @classmethod
    def _blocks_exist(cls, freezing: FreezingConfig | None, info: ValidationInfo) -> FreezingConfig | None:
        layers = info.data.get("layers")  # absent if it is wrong itself
        if freezing is not None and freezing.schedule is not None and layers is not None:
            most = max(blocks for _, blocks in freezing.schedule)
            if most > layers:
                raise ValueError(f"schedule freezes {most} blocks, the model has {layers} (layers)")
        return freezing


def read_model_config(config: str | os.PathLike[str] | dict[str, Any]) -> ModelConfig:
    """The "model" block of a DeepSpeed configuration, given as a path to the JSON or as its content.

    Raises:
        ConfigError: a file that cannot be read, no such block, or a wrong one: a line for each thing that is wrong.
    """
    settings = config if isinstance(config, dict) else load_json(config)
    if BLOCK not in settings:
        nearest = difflib.get_close_matches(BLOCK, [key for key in settings if isinstance(key, str)], n=1)
        hint = f'; is "{nearest[0]}" meant to be it?' if nearest else ""
        raise ConfigError(f'{BLOCK}: the configuration has no "{BLOCK}" block, {{}} is the smallest{hint}')
    return parse_block(ModelConfig, settings[BLOCK], BLOCK)
