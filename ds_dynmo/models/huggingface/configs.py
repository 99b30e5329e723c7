"""Read and check configs of Hugging Face's transformers, and give what our layers need to know of them.

This is the one module that imports transformers, when one of its functions is called.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

from torch import nn

from ds_dynmo.config import load_json
from ds_dynmo.config.explain import show, suggest
from ds_dynmo.errors import ConfigError

__all__ = [
    *("TOP_K", "check_blocks_draw_nothing", "config_json", "config_of", "default_attention", "differs_by_layer"),
    "experts_key",
    *("families", "library_module", "name_of", "plan_of", "tokenizer_files", "transformers"),
]

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*.tiktoken", "tekken*", "spiece.model", "sentencepiece*")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
ADAPTER = "adapter_config.json"
TOP_K = "num_experts_per_tok"
_SHOULD_BE = (
    "should be one of gpt2, llama, qwen2, qwen3, mixtral, or another causal language model whose base_model_pp_plan "
    "transformers declares"
)
DRAWS = ("dropout", "pdrop", "drop", "jitter_noise")  # ends of a config's keys; those of the embedding begin with "emb"


# Parts of the model without its head, in their order, of families for which transformers declares none.
PLANS = {"gpt2": ("wte", "wpe", "drop", "h", "ln_f")}


def transformers() -> Any:
    """Import transformers.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers as library
    except ImportError as error:
        raise ConfigError(
            f'needs transformers, the extra "huggingface": pip install transformers safetensors ({error})'
        ) from error
    return library


def library_module(name: str) -> Any:
    """Import a transformers module."""
    return importlib.import_module(f"{transformers().__name__}.{name}")


def check_blocks_draw_nothing(model: Any, why: str) -> None:
    """Refuse a model whose decoder layers draw random numbers in training.

    Args:
        model: as for :func:`ds_dynmo.models.huggingface.layers`.
        why: the reason, for the message.

    Raises:
        ConfigError: naming the config's key.
    """
    config = config_of(model)
    for key, value in config.to_dict().items():
        if key.endswith(DRAWS) and not key.startswith("emb") and isinstance(value, float) and value:
            raise ConfigError(f"{key} {value}: should be 0: {why}")


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
        if hasattr(config, "quantization_config") and _is_dequantized(model):
            del config.quantization_config
    elif isinstance(model, library.PreTrainedConfig):
        config = copy.deepcopy(model)
    elif isinstance(model, dict):
        config = _read(library, model, name_of(model))
        _check_keys(config, model)
    elif isinstance(model, (str, os.PathLike)):
        path = Path(model)
        if not path.exists():
            raise ConfigError(f"{path}: there is no such folder or file (models are not fetched)")
        if (path / ADAPTER).is_file():
            raise ConfigError(
                f"{path}: has {ADAPTER}: transformers would load the adapter too. Give the PeftModel that peft's "
                "from_pretrained(..., is_trainable=True) makes, or the folder of a model without adapters"
            )
        config = _read(library, config_json(path), str(_config_file(path)))
    else:
        raise ConfigError(f"a model should be a path, config or model of transformers, got {type(model).__name__}")
    _check_family(config, name_of(model))
    return config


def config_json(model: str | os.PathLike[str] | dict[str, Any]) -> dict[str, Any]:
    """Return what a ``config.json`` holds, given by its path, by the model's folder, or as it is.

    Raises:
        ConfigError: the file cannot be read.
    """
    return model if isinstance(model, dict) else load_json(_config_file(Path(model)))


def _config_file(model: Path) -> Path:
    return model / "config.json" if model.is_dir() else model


def default_attention(kind: Any) -> str:
    """Name the implementation of attention that we take for a transformers model class if nobody asks for one."""
    return "sdpa" if kind._supports_sdpa else "eager"


def plan_of(config: Any) -> tuple[str, ...]:
    """List the parts of the model without its head in their order; empty: they are not declared."""
    return PLANS.get(config.model_type) or tuple(config.base_model_pp_plan or ())


def families() -> list[str]:
    """List the model types whose parts are declared, and that have a causal language model."""
    auto = library_module("models.auto.modeling_auto")
    return [kind for kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _plan_of_type(kind)]


def _plan_of_type(kind: str) -> tuple[str, ...]:
    configuration = library_module("models.auto.configuration_auto")
    return plan_of(configuration.CONFIG_MAPPING[kind]) if kind in configuration.CONFIG_MAPPING else ()


def _read(library: Any, values: dict[str, Any], label: str) -> Any:
    kind = values.get("model_type")
    if not isinstance(kind, str) or not _plan_of_type(kind):
        code = "; its auto_map names code of its own, which is never run" if values.get("auto_map") else ""
        raise ConfigError(f"{label}: model_type {json.dumps(kind)}: {_SHOULD_BE}{code}")
    try:
        return type(library.AutoConfig.for_model(kind)).from_dict(
            copy.deepcopy(values)
        )  # transformers changes nested ones
    except Exception as error:  # transformers' own checks raise many kinds
        raise ConfigError(f"{label}: is not a config of a {kind} model: {error}") from error


def _check_keys(config: Any, values: dict[str, Any]) -> None:
    """Refuse keys that transformers would keep and ignore."""
    known = {
        *type(config)().to_dict(),
        *config.attribute_map,
        "torch_dtype",
        "rope_theta",
        "rope_scaling",
        "experts_implementation",
    }
    for key, value in values.items():
        if key not in known:
            meant = suggest(key, sorted(known))
            raise ConfigError(f"{key} = {show(value)}: a {config.model_type} config has no such key; {meant}")


def _is_dequantized(model: Any) -> bool:
    """Return whether a model has ordinary weights, whatever its config says, as one of a GGUF file has."""
    return all(type(weight) is nn.Parameter and weight.is_floating_point() for weight in model.parameters())


def _check_family(config: Any, label: str) -> None:
    auto = library_module("models.auto.modeling_auto")
    kind = config.model_type
    if not plan_of(config) or kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"{label}: model_type {kind}: {_SHOULD_BE}")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{label}: is_encoder_decoder: a pipeline has decoder layers alone")
    if config.sub_configs:
        parts = ", ".join(config.sub_configs)
        raise ConfigError(f"{label}: model_type {kind}: holds {parts}: a pipeline takes a model of text alone")
    if getattr(config, "add_cross_attention", False):
        raise ConfigError(f"{label}: add_cross_attention: there is no encoder to attend to")
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"{label}: quantization_config: quantized weights cannot be trained in a pipeline; give a model whose "
            "weights are floating: transformers' from_pretrained(folder, gguf_file=...) makes one, for example"
        )
    shared = getattr(config, "num_kv_shared_layers", 0)
    if shared:
        raise ConfigError(f"{label}: num_kv_shared_layers {shared}: layers that share keys and values cannot part")
    _check_sizes(config, label)


def _check_sizes(config: Any, label: str) -> None:
    """Refuse sizes that transformers would notice in the first pass only."""
    if differs_by_layer(config):
        return
    heads, groups = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int):
        if isinstance(groups, int) and (groups < 1 or heads % groups):
            raise ConfigError(f"{label}: num_key_value_heads {groups}: should divide num_attention_heads, {heads}")
        if _needs_equal_heads(config) and config.hidden_size % heads:
            raise ConfigError(f"{label}: num_attention_heads {heads}: should divide hidden_size, {config.hidden_size}")
    if config.num_hidden_layers < 1:
        raise ConfigError(f"{label}: num_hidden_layers {config.num_hidden_layers}: should be at least 1")
    count = experts_key(config)
    if count is None:
        return
    chosen, experts = getattr(config, TOP_K, None), getattr(config, count)
    if isinstance(chosen, int) and not 1 <= chosen <= experts:
        raise ConfigError(f"{label}: {TOP_K} {chosen}: should be in 1 to {count}, {experts}")
    coefficient = getattr(config, "router_aux_loss_coef", None) or 0
    if not 0 <= coefficient < math.inf:
        raise ConfigError(f"{label}: router_aux_loss_coef {coefficient}: should be 0 or more")


def differs_by_layer(config: Any) -> bool:
    """Return whether sizes differ from layer to layer: transformers has no common value of such a one."""
    return bool(getattr(config, "is_heterogeneous", False))


def _needs_equal_heads(config: Any) -> bool:
    """Return whether heads are as wide as the hidden states divided by their number."""
    return getattr(config, "head_dim", None) is None and not hasattr(config, "kv_lora_rank")


def experts_key(config: Any) -> str | None:
    """Find the config's key for how many experts a layer has; None: it has none, or not for all layers."""
    if differs_by_layer(config):
        return None
    return next((key for key in EXPERTS if isinstance(getattr(config, key, None), int) and getattr(config, key)), None)
