"""A GPT, its training text, and the ways in which it changes while it trains.

Names are loaded when first used, so that reading a configuration needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_dynmo.models.assembly import dynamic_cases, model_layers, vocabulary_of
    from ds_dynmo.models.case import CaseConfig, DynamicCase, RunSizes
    from ds_dynmo.models.config import ModelConfig, read_model_config
    from ds_dynmo.models.early_exit.config import EarlyExitConfig
    from ds_dynmo.models.early_exit.exits import EarlyExit
    from ds_dynmo.models.freezing.config import FreezingConfig
    from ds_dynmo.models.freezing.egeria import Egeria, EgeriaController
    from ds_dynmo.models.freezing.freezing import Freezing, FreezingController
    from ds_dynmo.models.freezing.frozen_prefix import set_frozen_prefix
    from ds_dynmo.models.gpt import gpt_layers, language_model_loss
    from ds_dynmo.models.gpt_config import GPTConfig
    from ds_dynmo.models.layer_numbers import local_layers
    from ds_dynmo.models.mixture_of_depths.block import MixtureOfDepthsBlock
    from ds_dynmo.models.mixture_of_depths.config import MixtureOfDepthsConfig
    from ds_dynmo.models.moe.config import MoEConfig
    from ds_dynmo.models.moe.layer import MixtureOfExperts, RouterBiasUpdate
    from ds_dynmo.models.pipeline import AUXILIARY_LOSS, LANGUAGE_MODEL_LOSS, LanguageModelPipeline
    from ds_dynmo.models.pruning.config import PruningConfig
    from ds_dynmo.models.pruning.gradual import Pruning
    from ds_dynmo.models.sparse_attention.config import SparseAttentionConfig
    from ds_dynmo.models.text import Batches, ByteText, load_text
    from ds_dynmo.models.vocabulary import with_labels

_MODULES = {
    **dict.fromkeys(("dynamic_cases", "model_layers", "vocabulary_of"), "assembly"),
    **dict.fromkeys(("CaseConfig", "DynamicCase", "RunSizes"), "case"),
    **dict.fromkeys(("ModelConfig", "read_model_config"), "config"),
    "EarlyExitConfig": "early_exit.config",
    "EarlyExit": "early_exit.exits",
    "FreezingConfig": "freezing.config",
    **dict.fromkeys(("Egeria", "EgeriaController"), "freezing.egeria"),
    "set_frozen_prefix": "freezing.frozen_prefix",
    **dict.fromkeys(("Freezing", "FreezingController"), "freezing.freezing"),
    **dict.fromkeys(("gpt_layers", "language_model_loss"), "gpt"),
    "GPTConfig": "gpt_config",
    "local_layers": "layer_numbers",
    "MixtureOfDepthsBlock": "mixture_of_depths.block",
    "MixtureOfDepthsConfig": "mixture_of_depths.config",
    "MoEConfig": "moe.config",
    **dict.fromkeys(("RouterBiasUpdate", "MixtureOfExperts"), "moe.layer"),
    **dict.fromkeys(("AUXILIARY_LOSS", "LANGUAGE_MODEL_LOSS", "LanguageModelPipeline"), "pipeline"),
    "PruningConfig": "pruning.config",
    "Pruning": "pruning.gradual",
    "SparseAttentionConfig": "sparse_attention.config",
    **dict.fromkeys(("Batches", "ByteText", "load_text"), "text"),
    "with_labels": "vocabulary",
}
"""Per name, the module that has it."""

__all__ = [
    "AUXILIARY_LOSS",
    "LANGUAGE_MODEL_LOSS",
    "Batches",
    "ByteText",
    "CaseConfig",
    "DynamicCase",
    "EarlyExit",
    "EarlyExitConfig",
    "Egeria",
    "EgeriaController",
    "Freezing",
    "FreezingConfig",
    "FreezingController",
    "GPTConfig",
    "LanguageModelPipeline",
    "MixtureOfDepthsBlock",
    "MixtureOfDepthsConfig",
    "MixtureOfExperts",
    "MoEConfig",
    "ModelConfig",
    "Pruning",
    "PruningConfig",
    "RouterBiasUpdate",
    "RunSizes",
    "SparseAttentionConfig",
    "dynamic_cases",
    "gpt_layers",
    "language_model_loss",
    "load_text",
    "local_layers",
    "model_layers",
    "read_model_config",
    "set_frozen_prefix",
    "vocabulary_of",
    "with_labels",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
