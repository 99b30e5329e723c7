"""What LoRA adapters a model is to have, and which of peft's settings are refused (optional extra ``peft``).

This is the one module that imports peft, when one of its functions is called.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_dynmo.config.explain import show, suggest
from ds_dynmo.errors import ConfigError

__all__ = ["COPIES", "Lora", "check_config", "peft_package", "split_off"]

NAME = "default"  # peft's, of an adapter that nobody named

# Keys of peft's LoraConfig that work layer by layer. All others have to have their defaults.
WORKS = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "bias", "use_rslora", "use_dora"),
    *("lora_bias", "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("fan_in_fan_out", "init_lora_weights"),
)
_ABOUT = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision")
COPIES = "modules_to_save"
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda value: type(value) is int and value > 0, "an integer above 0"),
    "lora_alpha": (lambda value: type(value) in (int, float) and value > 0, "a number above 0"),
    "lora_dropout": (lambda value: type(value) in (int, float) and 0 <= value < 1, "a number from 0 to below 1"),
    "bias": (lambda value: value in ("none", "all", "lora_only"), '"none", "all" or "lora_only"'),
    "init_lora_weights": (
        lambda value: value in (True, False, "gaussian", "orthogonal"),
        'true, false, "gaussian" or "orthogonal": others change the base, or need data',
    ),
}


def peft_package() -> Any:
    """Import peft.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f'needs peft, the extra "peft": pip install peft ({error})') from error
    return peft


@dataclass(frozen=True)
class Lora:
    """What adapters a model is to have.

    Attributes:
        config: peft's, a copy.
        name: the adapter's.
        model: transformers' model that has the adapter; None: it is made anew.
    """

    config: Any
    name: str = NAME
    model: Any = None


def split_off(model: Any, settings: Any) -> tuple[Any, Lora | None]:
    """Find the model without adapters in what :func:`ds_dynmo.models.huggingface.layers` takes, and its adapters.

    Args:
        settings: keys of peft's ``LoraConfig``, or one; None: a model that is no ``PeftModel`` has no adapters.

    Raises:
        ConfigError: adapters that do not work in a pipeline.
    """
    found = sys.modules.get("peft")
    if found is not None and isinstance(model, found.PeftModel):
        if settings is not None:
            raise ConfigError("peft: the model is a PeftModel, which says what its adapters are")
        return model.get_base_model(), _of_model(model, found)
    if isinstance(model, nn.Module) and getattr(model, "peft_config", None):
        raise ConfigError(f"{type(model).__name__}: has adapters and is no PeftModel: peft.get_peft_model() makes one")
    return model, None if settings is None else Lora(_config(settings))


def _config(settings: Any) -> Any:
    kind = peft_package().LoraConfig
    if isinstance(settings, Mapping):
        _check_keys(settings, [field.name for field in dataclasses.fields(kind)])
        given = {key: value for key, value in settings.items() if key != "peft_type"}
        _check_type(settings.get("peft_type", "LORA"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = kind(**given)
        except Exception as error:  # peft's own checks raise several kinds
            raise ConfigError(f"peft: {error}") from error
    elif isinstance(settings, peft_package().PeftConfig):
        config = copy.deepcopy(settings)
    else:
        raise ConfigError(f"peft: should be a LoraConfig or its keys, got {type(settings).__name__}")
    if config.inference_mode:
        raise ConfigError("peft: inference_mode = true: no adapter would train")
    check_config(config)
    return config


_OTHER_NAMES = {"rank": "r", "lora_rank": "r", "lora_r": "r"}  # of other libraries


def _check_keys(settings: Mapping[str, Any], known: list[str]) -> None:
    for key, value in settings.items():
        if key not in known:
            meant = suggest(_OTHER_NAMES.get(key, str(key)), known)
            raise ConfigError(f"peft.{key} = {show(value)}: a LoraConfig has no such key; {meant}")


def _check_type(kind: Any) -> None:
    name = str(getattr(kind, "value", kind))
    if name != "LORA":
        raise ConfigError(f"peft: peft_type {name}: works in no pipeline, LORA alone does")


def check_config(config: Any) -> None:
    _check_type(config.peft_type)
    if config.target_parameters:
        raise ConfigError(
            f"peft.target_parameters = {sorted(config.target_parameters)}: weights of experts, which are no modules, "
            'cannot have adapters in a pipeline ("all-linear" and "gate_proj" may take them too): name modules of the '
            "attention in target_modules"
        )
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        is_default = value == default or not (value or default)
        if field.name not in (*WORKS, *_ABOUT, "inference_mode") and not is_default:
            raise ConfigError(
                f"peft.{field.name} = {value!r}: does not work layer by layer; keys that do: {', '.join(WORKS)}"
            )
    for key, (holds, allowed) in _VALUES.items():
        value = getattr(config, key)
        if not holds(value):
            raise ConfigError(f"peft.{key} = {value!r}: should be {allowed}")


def _of_model(model: Any, found: Any) -> Lora:
    """Describe the active adapter of a ``PeftModel``."""
    names = list(model.active_adapters)
    if len(names) != 1:
        raise ConfigError(f"the PeftModel has {len(names)} active adapters, {', '.join(names)}: one can train")
    config = copy.deepcopy(model.peft_config[names[0]])
    check_config(config)
    config.inference_mode = False  # whether it trains is said by requires_grad
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, found.tuners.tuners_utils.BaseTunerLayer):
            if module.merged:
                raise ConfigError(f"{name}: its adapter is merged into its base: call unmerge_adapter() first")
            if module.disable_adapters:
                raise ConfigError(f"{name}: its adapter is disabled: call enable_adapter_layers() first")
    return Lora(config, names[0], model.get_base_model())
