"""The "model" block of the DeepSpeed JSON: the GPT's sizes and the dynamic case."""

from __future__ import annotations

import difflib
import os
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_dynmo.config import load_json, parse_block
from ds_dynmo.errors import ConfigError
from ds_dynmo.models.freezing import FreezingConfig
from ds_dynmo.models.gpt import GPTConfig
from ds_dynmo.models.routing import MoEConfig, moe_blocks
from ds_dynmo.models.pruning import PruningConfig
from ds_dynmo.models.sparse_attention import SparseAttentionConfig
from ds_dynmo.models.mixture_of_depths import MixtureOfDepthsConfig

__all__ = ["ModelConfig", "read_model_config"]

BLOCK = "model"


class ModelConfig(GPTConfig):
    """The "model" block. Steps are given as fractions of the run's steps."""

    vocab_size: int = Field(default=256, ge=256, description="at least 256, the text is bytes")
    freezing: FreezingConfig | None = Field(default=None, description="freezes the front of the model; null: nothing")
    moe: MoEConfig | None = Field(default=None, description="experts in place of feed-forward layers; null: none")

    @property
    def carries(self) -> Literal["hidden", "auxiliary", "exits"]:
        return "auxiliary" if self.moe is not None and self.moe.routing == "aux_loss" else "hidden"
    pruning: PruningConfig | None = Field(default=None, description="prunes the blocks' weights; null: nothing")
    sparse_attention: SparseAttentionConfig | None = Field(
        default=None, description="attention over a pattern drawn anew in every pass; null: dense causal attention"
    )
    mod: MixtureOfDepthsConfig | None = Field(
        default=None, description="mixture of depths: blocks that take some of the tokens; null: all blocks take all"
    )

    @property
    def carries(self) -> Literal["hidden", "auxiliary", "exits"]:
        """See :attr:`GPTConfig.carries`."""
        return "auxiliary" if self.mod is not None and self.mod.sampling == "predictor" else "hidden"

    @field_validator("freezing")
    @classmethod
    def _blocks_exist(cls, freezing: FreezingConfig | None, info: ValidationInfo) -> FreezingConfig | None:
        layers = info.data.get("layers")  # absent if it is wrong itself
        if freezing is not None and freezing.schedule is not None and layers is not None:
            most = max(blocks for _, blocks in freezing.schedule)
            if most > layers:
                raise ValueError(f"schedule freezes {most} blocks, the model has {layers} (layers)")
        return freezing

    @field_validator("moe")
    @classmethod
    def _a_block_has_experts(cls, moe: MoEConfig | None, info: ValidationInfo) -> MoEConfig | None:
        layers = info.data.get("layers")  # absent if it is wrong itself
        if moe is not None and layers is not None and not moe_blocks(moe, layers):
            raise ValueError(
                f"leaves no block with experts: dense_blocks {moe.dense_blocks}, every {moe.every}, "
                f"the model has {layers} (layers)"
            )
        return moe
    @field_validator("sparse_attention")
    @classmethod
    def _buckets_fill(cls, sparse: SparseAttentionConfig | None, info: ValidationInfo) -> SparseAttentionConfig | None:
        tokens = info.data.get("sequence_length")  # absent if it is wrong itself
        if sparse is not None and sparse.buckets is not None and tokens is not None and sparse.buckets > tokens:
            raise ValueError(f"hashes into {sparse.buckets} buckets, a sequence has {tokens} tokens (sequence_length)")
        return sparse
    @field_validator("mod")
    @classmethod
    def _routes_a_block(cls, mod: MixtureOfDepthsConfig | None, info: ValidationInfo) -> MixtureOfDepthsConfig | None:
        layers = info.data.get("layers")
        if mod is not None and layers is not None and mod.every > layers:
            raise ValueError(f"every {mod.every} blocks one is routed (every), the model has {layers} (layers)")
        return mod


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
