"""The "model" block of the DeepSpeed JSON: the GPT's sizes and the dynamic case."""

from __future__ import annotations

import difflib
import os
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_dynmo.config import load_json, parse_block
from ds_dynmo.errors import ConfigError
from ds_dynmo.models.exit_criteria import EarlyExitConfig
from ds_dynmo.models.freezing import FreezingConfig
from ds_dynmo.models.gpt import GPTConfig

__all__ = ["ModelConfig", "read_model_config"]

BLOCK = "model"


class ModelConfig(GPTConfig):
    """The "model" block. Steps are given as fractions of the run's steps."""

    vocab_size: int = Field(default=256, ge=256, description="at least 256, the text is bytes")
    freezing: FreezingConfig | None = Field(default=None, description="freezes the front of the model; null: nothing")
    early_exit: EarlyExitConfig | None = Field(default=None, description="lets confident tokens leave; null: none")

    @property
    def carries(self) -> Literal["hidden", "auxiliary", "exits"]:
        return "hidden" if self.early_exit is None else "exits"

    @field_validator("freezing")
    @classmethod
    def _blocks_exist(cls, freezing: FreezingConfig | None, info: ValidationInfo) -> FreezingConfig | None:
        layers = info.data.get("layers")  # absent if it is wrong itself
        if freezing is not None and freezing.schedule is not None and layers is not None:
            most = max(blocks for _, blocks in freezing.schedule)
            if most > layers:
                raise ValueError(f"schedule freezes {most} blocks, the model has {layers} (layers)")
        return freezing

    @field_validator("early_exit")
    @classmethod
    def _exits_fit(cls, early_exit: EarlyExitConfig | None, info: ValidationInfo) -> EarlyExitConfig | None:
        if early_exit is None:
            return None
        if info.data.get("freezing") is not None:
            raise ValueError("cannot be combined with freezing, which counts layers without exits")
        layers = info.data.get("layers")
        if layers is not None:
            exits = early_exit.exits(layers)
            if not exits or exits[-1] >= layers:
                last = exits[-1] if exits else 1
                raise ValueError(f"has an exit after block {last}, exits lie before the last of {layers} (layers)")
        return early_exit


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
