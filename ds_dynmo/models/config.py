"""The "model" block of the DeepSpeed JSON: the GPT's sizes and the dynamic case."""

from __future__ import annotations

import difflib
import os
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from ds_dynmo.config import load_settings, parse_block
from ds_dynmo.config.explain import show
from ds_dynmo.errors import ConfigError
from ds_dynmo.models.early_exit.criteria import EarlyExitConfig
from ds_dynmo.models.freezing.prefix import FreezingConfig
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.mixture_of_depths import MixtureOfDepthsConfig
from ds_dynmo.models.moe.routing import MoEConfig, moe_blocks
from ds_dynmo.models.pruning.gradual import PruningConfig
from ds_dynmo.models.sparse_attention.attention import SparseAttentionConfig
from ds_dynmo.models.text import Sampling

__all__ = ["ModelConfig", "read_model_config"]

BLOCK = "model"
BYTES = 256  # the text's different tokens
BESIDE_HUGGINGFACE = {
    *("huggingface", "verified", "tokens", "sequence_length", "seed", "sampling", "freezing", "expert_parallel"),
    *("peft", "save_base"),
}

# By case, those before it in the block that it cannot be combined with, and why.
_APART = {
    "pruning": {"moe": "experts are not pruned"},
    "mod": {
        "split_blocks": "a routed block takes its tokens through both halves at once",
        "pruning": "a routed block has no weights that can be pruned",
    },
    "early_exit": {
        "split_blocks": "tokens leave after whole blocks",
        "freezing": "it counts layers without exits",
        "moe": "blocks that tokens leave have one feed-forward part",
        "pruning": "blocks that tokens leave have no weights that can be pruned",
        "sparse_attention": "tokens that left are attended to by all that remain",
        "mod": "both choose a block's tokens",
    },
}

# Keys of earlier versions, and what to do instead.
_WITHDRAWN = {
    "freezing.cache_bytes": "outputs of frozen layers are not kept, and no number of a run depends on that; remove it",
    "pruning.block_size": "single weights are pruned, which is as fast; remove it",
    "early_exit.loss_tokens": "the loss of an exit counts all tokens; remove it",
}

_BY_SCHEDULE = (
    "can be combined with freezing.schedule only: other ways look at weights, of which every replica has others"
)


class ModelConfig(GPTConfig):
    """The "model" block. Steps are given as fractions of the run's steps."""

    vocab_size: int = Field(default=BYTES, ge=BYTES, description="at least 256, the bytes of text without a tokenizer")
    sampling: Sampling = Field(
        default="random",
        description='"random": training sequences from random places of the text; "epochs": the same micro-batches in '
        "every epoch, in another order",
    )
    huggingface: str | dict[str, Any] | None = Field(
        default=None,
        description="a folder with config.json and safetensors files, or for fresh weights the path of a config.json, "
        'or what is in one; beside it "verified", "tokens", "sequence_length", "seed", "sampling", "freezing", '
        '"expert_parallel", "peft" and "save_base" alone may stand',
    )
    verified: bool = Field(
        default=True,
        description="compare a tiny model of the Hugging Face family with the library's first; false: trust the parts "
        "that the library declares",
    )
    expert_parallel: bool = Field(
        default=False,
        description="data-parallel replicas share the experts of the Hugging Face model: it has to have a multiple of "
        "them in each layer",
    )
    peft: dict[str, Any] | None = Field(
        default=None,
        description="keys of peft's LoraConfig: the Hugging Face model is frozen and gets LoRA adapters; null: none",
    )
    save_base: bool = Field(
        default=True,
        description="false: checkpoints leave the frozen base out, which is read from the model's folder again",
    )
    tokens: Literal["bytes"] | None = Field(
        default=None,
        description='"bytes": the text is trained byte by byte, even if the model has a tokenizer; null: as token ids '
        "if there is a tokenizer or the data is token ids",
    )
    freezing: FreezingConfig | None = Field(default=None, description="freezes the front of the model; null: nothing")
    moe: MoEConfig | None = Field(default=None, description="experts in place of feed-forward layers; null: none")
    pruning: PruningConfig | None = Field(default=None, description="prunes the blocks' weights; null: nothing")
    sparse_attention: SparseAttentionConfig | None = Field(
        default=None, description="attention over a pattern drawn anew in every pass; null: dense causal attention"
    )
    mod: MixtureOfDepthsConfig | None = Field(
        default=None, description="mixture of depths: blocks that take some of the tokens; null: all blocks take all"
    )
    early_exit: EarlyExitConfig | None = Field(default=None, description="lets confident tokens leave; null: none")

    @property
    def carries(self) -> Literal["hidden", "auxiliary", "exits"]:
        """See :attr:`GPTConfig.carries`."""
        if self.early_exit is not None:
            return "exits"
        balanced = self.moe is not None and self.moe.routing == "aux_loss"
        predicted = self.mod is not None and self.mod.sampling == "predictor"
        return "auxiliary" if balanced or predicted else "hidden"

    @property
    def scheduled(self) -> list[str]:
        """The keys of the cases that change the model at fractions of the run's steps."""
        exits_later = self.early_exit is not None and self.early_exit.start > 0
        capacities = self.mod.schedule if self.mod is not None else None
        by_steps = {
            "freezing": self.freezing,
            "pruning": self.pruning,
            "early_exit": exits_later or None,
            "mod": capacities,
        }
        return [key for key, case in by_steps.items() if case is not None]

    @field_validator(*_APART)
    @classmethod
    def _can_be_combined(cls, case: Any, info: ValidationInfo) -> Any:
        for other, why in _APART[str(info.field_name)].items():
            if case is not None and info.data.get(other) not in (None, False):
                raise ValueError(f"cannot be combined with {other}: {why}")
        return case

    @model_validator(mode="after")
    def _sizes_are_huggingfaces(self) -> ModelConfig:
        others = sorted(self.model_fields_set - BESIDE_HUGGINGFACE)
        if self.huggingface is not None and others:
            raise ValueError(
                f"{', '.join(others)}: cannot be given beside huggingface, whose config says what the model is"
            )
        return self

    @model_validator(mode="after")
    def _experts_can_be_shared(self) -> ModelConfig:
        if self.expert_parallel and self.huggingface is None:
            raise ValueError("expert_parallel: is for a Hugging Face model; for moe there is moe.expert_parallel")
        if self.expert_parallel and self.freezing is not None and self.freezing.schedule is None:
            raise ValueError(f"expert_parallel {_BY_SCHEDULE}")
        return self

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> ModelConfig:
        if self.peft is not None and self.huggingface is None:
            raise ValueError("peft: is for a Hugging Face model (huggingface)")
        if self.peft is not None and self.freezing is not None:
            raise ValueError("peft: cannot be combined with freezing, which would let the base train when it thaws")
        if self.peft is None and not self.save_base:
            raise ValueError("save_base = false: without peft all weights train, and have to be saved")
        return self

    @model_serializer(mode="wrap")
    def _without_ignored_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        if self.huggingface is None:
            return dumped
        return {key: value for key, value in dumped.items() if key in BESIDE_HUGGINGFACE}

    @field_validator("freezing")
    @classmethod
    def _fits_the_layers(cls, freezing: FreezingConfig | None, info: ValidationInfo) -> FreezingConfig | None:
        if freezing is not None and info.data.get("tied_embedding") and info.data.get("huggingface") is None:
            raise ValueError("would freeze the head with the embedding: needs tied_embedding = false")
        if freezing is not None and freezing.egeria is not None and info.data.get("split_blocks"):
            raise ValueError("egeria cannot be combined with split_blocks: it compares whole blocks with references")
        return freezing

    @field_validator("freezing")
    @classmethod
    def _blocks_exist(cls, freezing: FreezingConfig | None, info: ValidationInfo) -> FreezingConfig | None:
        layers = info.data.get("layers")  # absent if it is invalid
        if freezing is None or layers is None or info.data.get("huggingface") is not None:
            return freezing
        if freezing.most_blocks > layers:
            raise ValueError(f"schedule freezes {freezing.most_blocks} blocks, the model has {layers} (layers)")
        return freezing

    @field_validator("moe")
    @classmethod
    def _a_block_has_experts(cls, moe: MoEConfig | None, info: ValidationInfo) -> MoEConfig | None:
        layers = info.data.get("layers")  # absent if it is invalid
        if moe is not None and layers is not None and not moe_blocks(moe, layers):
            raise ValueError(
                f"leaves no block with experts: dense_blocks {moe.dense_blocks}, every {moe.every}, "
                f"the model has {layers} (layers)"
            )
        freezing = info.data.get("freezing")
        if moe is not None and moe.expert_parallel and freezing is not None and freezing.schedule is None:
            raise ValueError(f"expert_parallel {_BY_SCHEDULE}")
        return moe

    @field_validator("sparse_attention")
    @classmethod
    def _buckets_fill(cls, sparse: SparseAttentionConfig | None, info: ValidationInfo) -> SparseAttentionConfig | None:
        tokens = info.data.get("sequence_length")  # absent if it is invalid
        freezing = info.data.get("freezing")
        if sparse is not None and freezing is not None and freezing.egeria is not None:
            raise ValueError("cannot be combined with freezing.egeria: its references would draw other patterns")
        if sparse is not None and sparse.buckets is not None and tokens is not None and sparse.buckets > tokens:
            raise ValueError(f"hashes into {sparse.buckets} buckets, a sequence has {tokens} tokens (sequence_length)")
        return sparse

    @field_validator("mod")
    @classmethod
    def _routes_a_block(cls, mod: MixtureOfDepthsConfig | None, info: ValidationInfo) -> MixtureOfDepthsConfig | None:
        layers = info.data.get("layers")
        if mod is not None and layers is not None and mod.every > layers:
            raise ValueError(f"every {mod.every} blocks one is routed (every), the model has {layers} (layers)")
        if mod is not None and layers is not None and isinstance(mod.capacity, tuple):
            routed = layers // mod.every
            if len(mod.capacity) != routed:
                raise ValueError(
                    f"capacity lists {len(mod.capacity)} capacities, the model has {routed} routed blocks "
                    f"(layers {layers}, every {mod.every})"
                )
        moe = info.data.get("moe")
        if mod is not None and mod.threshold is not None and moe is not None and moe.expert_parallel:
            raise ValueError(
                "threshold cannot be combined with moe.expert_parallel: in an evaluation replicas would not run their "
                "experts equally often"
            )
        if mod is not None and mod.sampling == "predictor" and moe is not None and moe.expert_parallel:
            raise ValueError(
                'sampling "predictor" cannot be combined with moe.expert_parallel: in an evaluation replicas would not '
                'run their experts equally often; "topk" can'
            )
        return mod

    @field_validator("early_exit")
    @classmethod
    def _exits_fit(cls, early_exit: EarlyExitConfig | None, info: ValidationInfo) -> EarlyExitConfig | None:
        if early_exit is None:
            return None
        layers = info.data.get("layers")
        if layers is not None:
            exits = early_exit.exits(layers)
            if not exits or exits[-1] >= layers:
                last = exits[-1] if exits else 1
                raise ValueError(f"has an exit after block {last}, exits lie before the last of {layers} (layers)")
        return early_exit


def read_model_config(config: str | os.PathLike[str] | dict[str, Any]) -> ModelConfig:
    """Read the "model" block of a DeepSpeed configuration, given as a path to the JSON or as its content.

    Raises:
        ConfigError: the file cannot be read, or the block is missing or invalid; a line for each problem. Or it has a
            withdrawn key.
    """
    settings = load_settings(config)
    if BLOCK not in settings:
        nearest = difflib.get_close_matches(BLOCK, [key for key in settings if isinstance(key, str)], n=1)
        hint = f'; is "{nearest[0]}" meant to be it?' if nearest else ""
        raise ConfigError(f'{BLOCK}: the configuration has no "{BLOCK}" block, {{}} is the smallest{hint}')
    _refuse_withdrawn(settings[BLOCK])
    return parse_block(ModelConfig, settings[BLOCK], BLOCK)


def _refuse_withdrawn(block: Any) -> None:
    for path, remedy in _WITHDRAWN.items():
        case, key = path.split(".")
        keys = block.get(case) if isinstance(block, dict) else None
        if isinstance(keys, dict) and key in keys:
            raise ConfigError(f"{BLOCK}.{path} = {show(keys[key])}: is withdrawn: {remedy}")
