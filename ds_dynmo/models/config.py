"""The "model" section of the DeepSpeed JSON: the GPT's sizes and its dynamic cases, or a Hugging Face model."""

from __future__ import annotations

import difflib
import os
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from ds_dynmo.config import load_settings, parse_section
from ds_dynmo.errors import ConfigError
from ds_dynmo.models.case import CaseConfig, LayerOutputs
from ds_dynmo.models.early_exit.config import EarlyExitConfig
from ds_dynmo.models.freezing.config import FreezingConfig
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.mixture_of_depths.config import MixtureOfDepthsConfig
from ds_dynmo.models.moe.config import MoEConfig
from ds_dynmo.models.pruning.config import PruningConfig
from ds_dynmo.models.sparse_attention.config import SparseAttentionConfig

__all__ = ["ModelConfig", "read_model_config"]

SECTION = "model"
BYTES = 256  # the text's different tokens
BESIDE_HUGGINGFACE = {
    *("huggingface", "verified", "tokens", "sequence_length", "seed", "sampling", "case", "expert_parallel"),
    *("peft", "save_base", "vocabulary_slices", "split_blocks", "untie"),
}

AnyCaseConfig = Annotated[
    MoEConfig | PruningConfig | FreezingConfig | SparseAttentionConfig | MixtureOfDepthsConfig | EarlyExitConfig,
    Field(discriminator="kind"),
]
FoundCase = TypeVar("FoundCase", bound=CaseConfig)


class ModelConfig(GPTConfig):
    """The "model" section. Steps are given as fractions of the run's steps."""

    vocab_size: int = Field(default=BYTES, ge=BYTES, description="at least 256, the bytes of text without a tokenizer")
    sampling: Literal["random", "epochs"] = Field(
        default="random",
        description='"random": training sequences from random places of the text; "epochs": the same micro-batches in '
        "every epoch, in another order",
    )
    huggingface: str | dict[str, Any] | None = Field(
        default=None,
        description="a folder with config.json and safetensors files, or for fresh weights the path of a config.json, "
        'or what is in one; beside it "verified", "tokens", "sequence_length", "seed", "sampling", "case" of kind '
        '"freezing" or "pruning", "expert_parallel", "peft", "save_base", "vocabulary_slices", "split_blocks" and '
        '"untie" alone may stand',
    )
    untie: bool = Field(
        default=False,
        description="the head of the Hugging Face model gets its own copy of the embedding's weights, as case of kind "
        "freezing needs it; exports say so",
    )
    verified: bool = Field(
        default=True,
        description="compare a tiny model of the Hugging Face family with the library's first; false: trust the parts "
        "that the library declares",
    )
    expert_parallel: bool = Field(
        default=False,
        description="experts of the Hugging Face model are distributed over the data-parallel replicas: each layer has "
        "to have a multiple of them",
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
        description='"bytes": the data are trained byte by byte, even if the model has a tokenizer; null: as token '
        "ids if there is a tokenizer, or the data have rows",
    )
    case: tuple[AnyCaseConfig, ...] = Field(  # the last key: it is checked against all others
        default=None,
        validate_default=True,
        description='what changes while the model trains: an object with the key "kind", or a list of such objects of '
        "different kinds, in any order; null: nothing",
    )

    @property
    def layer_outputs(self) -> LayerOutputs:
        """See :attr:`GPTConfig.layer_outputs`."""
        needed = {case.layer_outputs for case in self.case}
        return "exits" if "exits" in needed else "auxiliary" if "auxiliary" in needed else "hidden"

    @property
    def most_slices(self) -> int | None:
        """See :attr:`GPTConfig.most_slices`."""
        return self.vocab_size if self.huggingface is None else None

    @property
    def distributes_experts(self) -> bool:
        """Whether data-parallel replicas hold different experts."""
        return self.expert_parallel or any(case.distributes_experts for case in self.case)

    def find_case(self, case_class: type[FoundCase]) -> FoundCase | None:
        """Return the case of this class; None: the model does not have it."""
        return next((case for case in self.case if isinstance(case, case_class)), None)

    @field_validator("case", mode="before")
    @classmethod
    def _as_tuple(cls, case: Any) -> tuple[Any, ...]:
        if isinstance(case, list | tuple):
            return tuple(case)
        if case is None or isinstance(case, dict | CaseConfig):
            return () if case is None else (case,)
        raise ValueError('should be null, an object such as {"kind": "moe"}, or a list of such objects')

    @field_validator("case")
    @classmethod
    def _fit_the_model(cls, cases: tuple[AnyCaseConfig, ...], info: ValidationInfo) -> tuple[AnyCaseConfig, ...]:
        kinds = [case.kind for case in cases]
        if twice := [kind for kind in sorted(set(kinds)) if kinds.count(kind) > 1]:
            raise ValueError(f"{twice[0]}: is given {kinds.count(twice[0])} times, should be given once")
        cases = tuple(sorted(cases, key=lambda case: case.kind))  # so that equal models have equal sections
        if len(info.data) < len(cls.model_fields) - 1:  # another key is invalid
            return cases
        model = cls.model_construct(**info.data, case=cases)
        for case in cases:
            try:
                _check_combination(case, model)
                case.check(model)
            except ValueError as error:
                raise ValueError(f"{case.kind}: {error}") from error
        return cases

    @field_serializer("case", mode="wrap")
    def _as_written(self, cases: tuple[AnyCaseConfig, ...], dump: SerializerFunctionWrapHandler) -> Any:
        dumped = list(dump(cases))
        return dumped if len(dumped) > 1 else dumped[0] if dumped else None

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
            raise ValueError('expert_parallel: is for a Hugging Face model; "case" of kind "moe" has one of its own')
        return self

    @model_validator(mode="after")
    def _a_head_can_be_untied(self) -> ModelConfig:
        if self.untie and self.huggingface is None:
            raise ValueError("untie: is for a Hugging Face model (huggingface); without one, tied_embedding = false")
        return self

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> ModelConfig:
        if self.peft is not None and self.huggingface is None:
            raise ValueError("peft: is for a Hugging Face model (huggingface)")
        if self.peft is None and not self.save_base:
            raise ValueError("save_base = false: without peft all weights train, and have to be saved")
        return self

    @model_serializer(mode="wrap")
    def _without_ignored_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        if self.huggingface is None:
            return dumped
        return {key: value for key, value in dumped.items() if key in BESIDE_HUGGINGFACE}


def _check_combination(case: CaseConfig, model: ModelConfig) -> None:
    if model.huggingface is not None and not case.for_huggingface:
        raise ValueError(
            "cannot be given beside huggingface: it replaces parts of the model by our own, whose weights a pretrained "
            "model does not have; leave out huggingface, or the case"
        )
    for other in model.case:
        if other.kind in case.apart_from:
            raise ValueError(f"cannot be combined with {other.kind}: {case.apart_from[other.kind]}")


def read_model_config(config: str | os.PathLike[str] | dict[str, Any]) -> ModelConfig:
    """Read the "model" section of a DeepSpeed configuration, given as a path to the JSON or as its content.

    Raises:
        ConfigError: the file cannot be read, or the section is missing or invalid; a line for each problem.
    """
    settings = load_settings(config)
    if SECTION not in settings:
        nearest = difflib.get_close_matches(SECTION, [key for key in settings if isinstance(key, str)], n=1)
        hint = f'; is "{nearest[0]}" meant to be it?' if nearest else ""
        raise ConfigError(f'{SECTION}: the configuration has no "{SECTION}" section, {{}} is the smallest{hint}')
    return parse_section(ModelConfig, settings[SECTION], SECTION)
