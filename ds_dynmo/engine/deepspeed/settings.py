"""DeepSpeed's configuration: find what DeepSpeed refuses in it, and read an engine's."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.utils import logger
from pydantic import ValidationError

from ds_dynmo.config import BATCH_KEYS, check_numbers, check_types_and_params
from ds_dynmo.config.deepspeed_keys import BUILT
from ds_dynmo.config.explain import explain, show, suggest
from ds_dynmo.errors import ConfigError

_SECTIONS = {  # of DeepSpeed's pydantic models; the last one reads several
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CompileConfig": "compile",
    "DeepSpeedMonitorConfig": "",
}
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # by the sections of monitors
_ADAM = (deepspeed_config.ADAM_OPTIMIZER, deepspeed_config.ADAMW_OPTIMIZER)
_OF_ADAM = (deepspeed_config.TORCH_ADAM_PARAM, deepspeed_config.ADAM_W_MODE, "fp32_optimizer_states")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse, by the names and the checks of DeepSpeed and torch, what they would refuse while an engine is built.

    Batch sizes are not checked: they depend on the number of replicas. Nor are values of DeepSpeed's own optimizers,
    which have to be compiled, and of an LR scheduler with a list, which may depend on the number of parameter groups.

    Raises:
        ConfigError: naming the key, its value and what is allowed or meant.
    """
    check_types_and_params(settings)
    check_numbers(settings)
    others = {key: value for key, value in settings.items() if key not in BATCH_KEYS}
    read = _tried(settings, "", lambda: DeepSpeedConfig({**others, "train_micro_batch_size_per_gpu": 1}))
    if (stage := int(read.zero_optimization_stage)) > 1:
        raise ConfigError(
            f"zero_optimization.stage = {stage}: cannot be combined with pipeline parallelism; allowed are 0 and 1"
        )
    _check_monitors(settings)
    accelerator = get_accelerator()
    if read.float16_config.enabled and not accelerator.is_fp16_supported():
        raise ConfigError(
            f"fp16.enabled = true: DeepSpeed's accelerator {accelerator.device_name()!r} does not support fp16; use "
            "bf16 or fp32"
        )
    weight = [torch.nn.Parameter(torch.zeros(1, device="cpu"))]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(weight)
    section = settings.get("optimizer")
    if section is not None and (kind := optimizer_class(section)) is not None:
        own = _OF_ADAM if section["type"].lower() in _ADAM else ()
        params = _params("optimizer", section, kind, own)
        if kind is not FusedAdam:
            params = {name: value for name, value in params.items() if name not in own}
            optimizer = _tried(settings, "optimizer.params: ", lambda: kind(weight, **params))
    section = settings.get("scheduler")
    if section is not None:
        scheduler = _scheduler_class(section)
        params = _params("scheduler", section, scheduler)
        if not any(isinstance(value, list) for value in params.values()):
            _tried(settings, "scheduler.params: ", lambda: scheduler(optimizer, **params))


def _check_monitors(settings: Mapping[str, Any]) -> None:
    """Refuse a monitor whose package is not installed, on rank 0, which alone writes to it."""
    for section, package in _PACKAGES.items():
        asked = (settings.get(section) or {}).get("enabled") and os.environ.get("RANK", "0") == "0"
        if asked and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{section}.enabled = true: the package {package} is not installed: pip install {package}, or set it "
                "to false"
            )


def optimizer_class(section: Mapping[str, Any]) -> type[Any] | None:
    """Find the class that DeepSpeed builds by its section "optimizer"; None: one of its own other than Adam.

    Raises:
        ConfigError: neither DeepSpeed nor torch has it.
    """
    name, params = section["type"], section.get("params") or {}
    if name.lower() in _ADAM:
        decoupled = name.lower() == deepspeed_config.ADAMW_OPTIMIZER or params.get(deepspeed_config.ADAM_W_MODE, True)
        of_torch = torch.optim.AdamW if decoupled else torch.optim.Adam
        return of_torch if params.get(deepspeed_config.TORCH_ADAM_PARAM) else FusedAdam
    if name.lower() == deepspeed_config.ADAGRAD_OPTIMIZER:
        return torch.optim.Adagrad
    if name.lower() in DEEPSPEED_OPTIMIZERS:
        return None
    return _named("optimizer", name, _classes(torch.optim, torch.optim.Optimizer))


def _scheduler_class(section: Mapping[str, Any]) -> type[Any]:
    of_deepspeed = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    of_torch = _classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    return _named("scheduler", section["type"], {**of_torch, **of_deepspeed})


def _classes(module: Any, base: type[Any]) -> dict[str, type[Any]]:
    """Return the public classes of a module that derive from ``base``, by name."""
    kinds = {name: kind for name, kind in vars(module).items() if isinstance(kind, type) and not name.startswith("_")}
    return {name: kind for name, kind in kinds.items() if issubclass(kind, base) and kind is not base}


def _named(key: str, name: str, kinds: Mapping[str, type[Any]]) -> type[Any]:
    if name not in kinds:
        raise ConfigError(f'{key}.type = "{name}": neither DeepSpeed nor torch has it; {suggest(name, list(kinds))}')
    return kinds[name]


def _params(key: str, section: Mapping[str, Any], kind: type[Any], more: Iterable[str] = ()) -> dict[str, Any]:
    """Check the names in ``section["params"]`` by the arguments of ``kind``, the first of which DeepSpeed gives."""
    given, arguments = dict(section.get("params") or {}), list(inspect.signature(kind).parameters.values())[1:]
    names = dict.fromkeys([*(argument.name for argument in arguments), *more])
    for name, value in section.items():
        if name in names and name not in BUILT[key]:
            raise ConfigError(
                f'{key}.{name} = {show(value)}: is a parameter, which DeepSpeed ignores here: "params": '
                f'{{"{name}": {show(value)}}}'
            )
    for name, value in given.items():
        if name not in names:
            clips = name == deepspeed_config.MAX_GRAD_NORM
            meant = 'DeepSpeed clips by the top-level key "gradient_clipping"' if clips else suggest(name, names)
            raise ConfigError(f"{key}.params.{name} = {show(value)}: {kind.__name__} has no such parameter; {meant}")
    for argument in arguments:
        if argument.default is argument.empty and argument.name not in given:
            raise ConfigError(f"{key}.params.{argument.name}: is required by {kind.__name__}")
        if argument.name in given:
            _check_number(f"{key}.params.{argument.name}", given[argument.name], argument.default)
    return given


def _check_number(name: str, value: Any, default: Any) -> None:
    """Refuse null or a string in the place of a number, alone or in a list: YAML reads 1e-3 as a string."""
    if isinstance(value, list | tuple):
        for place, element in enumerate(value):
            _check_number(f"{name}[{place}]", element, default)
    if value is not None and not isinstance(value, str):
        return
    try:
        meant = f"is a string, should be a number: {float(value or '')}"
    except ValueError:
        kinds = {type(element) for element in (default if isinstance(default, list | tuple) else [default])}
        if not kinds <= {int, float}:
            return
        meant = f"should be a number, such as {default}"
    raise ConfigError(f"{name} = {show(value)}: {meant}")


def _tried(settings: Mapping[str, Any], what: str, make: Callable[[], Any]) -> Any:
    disabled, logger.disabled = logger.disabled, True  # what it logs is logged once more when the engine is built
    try:
        return make()
    except ValidationError as error:
        name = _SECTIONS.get(error.title)
        kind = next((kind for kind in DeepSpeedConfigModel.__subclasses__() if kind.__name__ == error.title), None)
        if name is None or kind is None or (name and name not in settings):  # bf16 by its old name
            raise ConfigError(f"DeepSpeed refuses the configuration: {' '.join(str(error).split())}") from error
        lines = explain(error, kind, settings[name] if name else settings, name)
        raise ConfigError("\n".join(line.removeprefix(".") for line in lines)) from error
    except Exception as error:  # whatever DeepSpeed or torch checks by
        raise ConfigError(f"DeepSpeed refuses the configuration: {what}{' '.join(str(error).split())}") from error
    finally:
        logger.disabled = disabled


def waits_for_norm(engine: Any) -> bool:
    """Return whether an optimizer step waits for a norm or an overflow flag of all stages. Read in DeepSpeed 0.19.8."""
    if engine.gradient_clipping() > 0:
        return True
    if not engine.zero_optimization():
        return bool(engine.bfloat16_enabled())
    checks = engine.bfloat16_enabled() and getattr(engine._config.bfloat16_config, "check_grad_overflow", True)
    return bool(checks or engine.fp16_enabled() or getattr(engine._config.zero_config, "compute_grad_norm", True))


def sums_whole(engine: Any) -> str | None:
    """Find the key that lets ZeRO sum every gradient over all replicas, per-replica ones too; None if it does not.

    Read in DeepSpeed 0.19.8: ``average_tensor`` and ``reduce_ipg_grads`` of runtime/zero/stage_1_and_2.py.
    """
    keys = {"reduce_scatter": engine.zero_reduce_scatter, "contiguous_gradients": engine.zero_contiguous_gradients}
    return next((key for key, enabled in keys.items() if engine.zero_optimization() and not enabled()), None)
