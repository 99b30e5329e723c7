"""A GPT, its training text, and the ways in which it changes while it trains."""

from ds_dynmo.models.assembly import dynamic_cases, model_layers, vocabulary_of
from ds_dynmo.models.case import DynamicCase
from ds_dynmo.models.config import ModelConfig, read_model_config
from ds_dynmo.models.early_exit.criteria import EarlyExitConfig
from ds_dynmo.models.early_exit.exits import EarlyExit
from ds_dynmo.models.freezing.egeria import Egeria, EgeriaController
from ds_dynmo.models.freezing.front import set_frozen_prefix
from ds_dynmo.models.freezing.prefix import Freezing, FreezingConfig, FreezingController
from ds_dynmo.models.gpt import gpt_layers, language_model_loss
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.local_layers import local_layers
from ds_dynmo.models.mixture_of_depths import MixtureOfDepthsBlock, MixtureOfDepthsConfig
from ds_dynmo.models.moe.layer import ExpertBalance, MixtureOfExperts
from ds_dynmo.models.moe.routing import MoEConfig
from ds_dynmo.models.pipeline import AUXILIARY_LOSS, LANGUAGE_MODEL_LOSS, LanguageModelPipeline
from ds_dynmo.models.pruning.gradual import Pruning, PruningConfig
from ds_dynmo.models.sparse_attention.attention import SparseAttentionConfig
from ds_dynmo.models.text import Batches, ByteText, EpochBatches, load_text

__all__ = [
    "AUXILIARY_LOSS",
    "LANGUAGE_MODEL_LOSS",
    "Batches",
    "ByteText",
    "DynamicCase",
    "EarlyExit",
    "EarlyExitConfig",
    "Egeria",
    "EgeriaController",
    "EpochBatches",
    "ExpertBalance",
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
]
