"""Read and check configs of Hugging Face's transformers, and give what our layers need to know of them.

This is the one module that imports transformers, when one of its functions is called.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_dynmo.config import load_json
from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.experts import Experts
from ds_dynmo.models.huggingface.modules import RouterLoss
from ds_dynmo.models.huggingface.weights import ExpertFiles

__all__ = [
    *("FAMILIES", "check_blocks_draw_nothing", "config_of", "experts_of", "name_of", "router_loss"),
    *("tokenizer_files", "transformers", "window"),
]

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*.tiktoken", "tekken*", "spiece.model", "sentencepiece*")
DRAWS_IN_BLOCKS = ("attn_pdrop", "resid_pdrop", "attention_dropout", "router_jitter_noise")  # keys of configs


@dataclass(frozen=True)
class _MoE:
    """Where the library keeps what concerns experts.

    Attributes:
        router, experts: paths in a decoder layer.
        count, top_k: keys of the config: experts of a layer, and experts that a token is sent to.
        files: how they are named in files.
    """

    files: ExpertFiles
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    count: str = "num_local_experts"
    top_k: str = "num_experts_per_tok"


@dataclass(frozen=True)
class _Family:
    """Where the library keeps the parts of a model.

    Attributes:
        blocks, norm, positions: names in its model without the head.
        moe: its decoder layers have experts.
    """

    blocks: str = "layers"
    norm: str = "norm"
    positions: str | None = None
    moe: _MoE | None = None


FAMILIES = {
    "gpt2": _Family(blocks="h", norm="ln_f", positions="wpe"),
    "llama": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(),
    "mixtral": _Family(moe=_MoE(ExpertFiles("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}))),
}


def transformers() -> Any:
    """Import the library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers as library
    except ImportError as error:
        raise ConfigError(
            f'needs transformers, the extra "huggingface": pip install ds_dynmo[huggingface] ({error})'
        ) from error
    return library


def check_blocks_draw_nothing(model: Any, why: str) -> None:
    """Refuse a model whose decoder layers draw random numbers in training.

    Args:
        model: as for :func:`ds_dynmo.models.huggingface.layers`.
        why: the reason, for the message.

    Raises:
        ConfigError: naming the config's key.
    """
    config = config_of(model)
    for key in DRAWS_IN_BLOCKS:
        if getattr(config, key, None):
            raise ConfigError(f"{key} {getattr(config, key)}: should be 0: {why}")


def tokenizer_files(model: Any) -> list[str]:
    """List the names of a tokenizer's files in the folder ``model``; empty where it is anything else."""
    if not isinstance(model, (str, os.PathLike)) or not Path(model).is_dir():
        return []
    return sorted({path.name for pattern in TOKENIZER_FILES for path in Path(model).glob(pattern)})


def name_of(model: Any) -> str:
    """Name a model in messages."""
    return str(model) if isinstance(model, (str, os.PathLike)) else f"the {type(model).__name__}"


def config_of(model: Any) -> Any:
    """Make a config object of our own of what :func:`ds_dynmo.models.huggingface.layers` takes.

    Raises:
        ConfigError: as :func:`ds_dynmo.models.huggingface.layers`.
    """
    library = transformers()
    if isinstance(model, library.PreTrainedModel):
        config = copy.deepcopy(model.config)
    elif isinstance(model, library.PreTrainedConfig):
        config = copy.deepcopy(model)
    elif isinstance(model, dict):
        config = _read(library, model, name_of(model))
        _check_keys(config, model)
    elif isinstance(model, (str, os.PathLike)):
        path = Path(model)
        if not path.exists():
            raise ConfigError(f"{path}: there is no such folder or file (models are not fetched)")
        path = path / "config.json" if path.is_dir() else path
        config = _read(library, load_json(path), str(path))
    else:
        raise ConfigError(f"a model should be a path, config or model of transformers, got {type(model).__name__}")
    _check_family(config, name_of(model))
    return config


def _read(library: Any, values: dict[str, Any], place: str) -> Any:
    kind = values.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"{place}: model_type {json.dumps(kind)}: should be one of {', '.join(FAMILIES)}")
    try:
        return type(library.AutoConfig.for_model(kind)).from_dict(
            copy.deepcopy(values)
        )  # the library changes nested ones
    except Exception as error:  # the library's own checks raise many kinds
        raise ConfigError(f"{place}: is not a config of a {kind} model: {error}") from error


def _check_keys(config: Any, values: dict[str, Any]) -> None:
    """Refuse keys that the library would keep and ignore."""
    known = {
        *type(config)().to_dict(),
        *config.attribute_map,
        "torch_dtype",
        "rope_theta",
        "rope_scaling",
        "experts_implementation",
    }
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(f"{key}: a {config.model_type} config has no such key{hint}")


def _check_family(config: Any, place: str) -> None:
    if config.model_type not in FAMILIES:
        raise ConfigError(f"{place}: model_type {config.model_type}: should be one of {', '.join(FAMILIES)}")
    if getattr(config, "add_cross_attention", False):
        raise ConfigError(f"{place}: add_cross_attention: there is no encoder to attend to")
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{place}: quantization_config: quantized weights cannot be trained in a pipeline")
    _check_sizes(config, place)


def _check_sizes(config: Any, place: str) -> None:
    """Refuse sizes that the library would notice in the first pass only."""
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if groups is not None and (groups < 1 or heads % groups):
        raise ConfigError(f"{place}: num_key_value_heads {groups}: should divide num_attention_heads, {heads}")
    if getattr(config, "head_dim", None) is None and config.hidden_size % heads:
        raise ConfigError(f"{place}: num_attention_heads {heads}: should divide hidden_size, {config.hidden_size}")
    if config.num_hidden_layers < 1:
        raise ConfigError(f"{place}: num_hidden_layers {config.num_hidden_layers}: should be at least 1")
    moe = FAMILIES[config.model_type].moe
    if moe is None:
        return
    chosen, experts = getattr(config, moe.top_k), getattr(config, moe.count)
    if not 1 <= chosen <= experts:
        raise ConfigError(f"{place}: {moe.top_k} {chosen}: should be in 1 to {moe.count}, {experts}")
    if not 0 <= (config.router_aux_loss_coef or 0) < math.inf:
        raise ConfigError(f"{place}: router_aux_loss_coef {config.router_aux_loss_coef}: should be 0 or more")


def window(config: Any, block: int) -> int | None:
    """Give the sliding window of decoder layer ``block``, in tokens; None: it attends to all."""
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "mixtral" or (kinds and kinds[block] == "sliding_attention"):
        return getattr(config, "sliding_window", None)
    return None


def experts_of(config: Any, place: str, *, parallel: bool) -> Experts | None:
    """Describe the experts of the decoder layers; None: the family has none.

    Raises:
        ConfigError: replicas cannot share experts (``parallel``) where there are none.
    """
    moe = FAMILIES[config.model_type].moe
    if moe is None:
        if parallel:
            raise ConfigError(f"expert_parallel: {place}, model_type {config.model_type}, has no experts to share out")
        return None
    return Experts(moe.experts, getattr(config, moe.count), getattr(config, moe.top_k), moe.count, parallel)


def router_loss(config: Any) -> RouterLoss | None:
    """Describe what routers add to the loss; None where the config does not ask for it."""
    moe = FAMILIES[config.model_type].moe
    if moe is None or not config.output_router_logits or not config.router_aux_loss_coef:
        return None
    return RouterLoss(
        experts=getattr(config, moe.count),
        top_k=getattr(config, moe.top_k),
        layers=config.num_hidden_layers,
        coefficient=config.router_aux_loss_coef,
        router=moe.router,
    )
