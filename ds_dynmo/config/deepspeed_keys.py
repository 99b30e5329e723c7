"""Check keys of DeepSpeed's own that it refuses late, in an engine's constructor: without torch, in one line each."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping
from typing import Any

from ds_dynmo.config.explain import show, suggest
from ds_dynmo.errors import ConfigError

BATCH, MICRO_BATCH, ACCUMULATION = BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_OBJECTS = (
    *("optimizer", "scheduler", "fp16", "bf16", "pipeline", "activation_checkpointing", "checkpoint", "data_types"),
    *("compile", "tensorboard", "csv_monitor", "wandb", "comet", "data_efficiency", "torch_autocast", "timers"),
)
BUILT = {"optimizer": ("type", "params", "legacy_fusion"), "scheduler": ("type", "params")}
_EXAMPLES = {
    "optimizer": 'such as {"type": "AdamW", "params": {"lr": 3e-4}}',
    "scheduler": 'such as {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
}


def check_deepspeed_keys(settings: Mapping[str, Any]) -> None:
    """Refuse objects that are none, numbers that are none, and a configuration without an optimizer.

    Raises:
        ConfigError: naming the key, its value and what is allowed.
    """
    for key in _OBJECTS:
        _check_object(key, settings.get(key, {}))
    check_numbers(settings)
    if all((settings.get(key) or {}).get("enabled") for key in ("fp16", "bf16")):
        raise ConfigError("fp16.enabled and bf16.enabled are true: only one of them can be")
    if "optimizer" not in settings:
        raise ConfigError(f"optimizer: is missing; it is an object, {_EXAMPLES['optimizer']}")
    check_types_and_params(settings)
    for section, known in BUILT.items():
        for key, value in settings.get(section, {}).items():
            if key not in known:
                raise ConfigError(f"{section}.{key} = {show(value)}: unknown key; {suggest(key, known)}")


def check_numbers(settings: Mapping[str, Any]) -> None:
    """Refuse, at the top level, numbers that are none: DeepSpeed calculates with them before it looks at them.

    Raises:
        ConfigError: naming the key, its value and what is allowed.
    """
    for key in BATCH_KEYS:
        if settings.get(key) is not None and not _is_number(settings[key], numbers.Integral, 1):
            raise ConfigError(f"{key} = {show(settings[key])}: should be an int of at least 1")
    clipping = settings.get("gradient_clipping", 0.0)
    if not _is_number(clipping, numbers.Real, 0):
        raise ConfigError(f"gradient_clipping = {show(clipping)}: should be a number of at least 0")
    for key in ("gradient_predivide_factor", "steps_per_print"):
        if settings.get(key) is not None and not (_is_number(settings[key], numbers.Real) and settings[key]):
            raise ConfigError(f"{key} = {show(settings[key])}: should be a number other than 0")


def _is_number(value: Any, kind: type[Any], least: float = -math.inf) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and value >= least


def check_types_and_params(settings: Mapping[str, Any]) -> None:
    """Refuse an optimizer or an LR scheduler without a name, and a key beside it that is nearly one of DeepSpeed's.

    DeepSpeed ignores other keys, which may be a program's own.

    Raises:
        ConfigError: naming the key, its value and what is allowed.
    """
    for section, known in BUILT.items():
        if section not in settings:
            continue
        _check_object(section, settings[section])
        for key, value in settings[section].items():
            if key not in known and difflib.get_close_matches(str(key).lower(), known):
                raise ConfigError(f"{section}.{key} = {show(value)}: unknown key; {suggest(str(key), known)}")
        name = settings[section].get("type")
        if not isinstance(name, str):
            raise ConfigError(f"{section}.type = {show(name)}: should be a name, {_EXAMPLES[section]}")
        _check_object(f"{section}.params", settings[section].get("params", {}))


def _check_object(key: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{key} = {show(value)}: should be an object")


def check_batch_sizes(settings: Mapping[str, Any], replicas: int) -> None:
    """Refuse batch sizes that DeepSpeed cannot complete, or that do not fit ``replicas`` of the pipeline.

    Raises:
        ConfigError: naming the keys, with both numbers.
    """
    batch, *others = (settings.get(key) for key in BATCH_KEYS)
    if batch is None and others[0] is None:
        raise ConfigError(f"{MICRO_BATCH}: is missing; give it, or {BATCH}")
    if batch is None:
        return
    factors = [(key, value) for key, value in zip((MICRO_BATCH, ACCUMULATION), others) if value is not None]
    product = replicas
    for _, value in factors:
        product *= value
    if batch % product or (len(factors) == 2 and batch != product):
        named = " x ".join([*(f"{key} {value}" for key, value in factors), f"replicas {replicas}"])
        allowed = "should be" if len(factors) == 2 else "should be a multiple of"
        raise ConfigError(f"{BATCH} = {batch}: {allowed} {named} = {product}")
