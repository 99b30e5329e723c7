"""DeepSpeed's configuration: find what DeepSpeed refuses in it, and read an engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.utils import logger
from pydantic import ValidationError

from ds_dynmo.config import BATCH_KEYS
from ds_dynmo.errors import ConfigError

_SECTIONS = {  # of DeepSpeed's pydantic models; the last one reads several
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CompileConfig": "compile",
    "DeepSpeedMonitorConfig": "",
}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse, by the checks of DeepSpeed and torch, what would be refused while an engine is built.

    Batch sizes are not checked: they depend on the number of replicas. Nor are parameters of DeepSpeed's optimizers,
    which have to be compiled.

    Raises:
        ConfigError: one line.
    """
    others = {key: value for key, value in settings.items() if key not in BATCH_KEYS}
    read = _tried("", lambda: DeepSpeedConfig({**others, "train_micro_batch_size_per_gpu": 1}))
    weight = [torch.nn.Parameter(torch.zeros(1, device="cpu"))]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(weight)
    name, params = str(read.optimizer_name), dict(read.optimizer_params or {})
    if params.pop("torch_adam", False):
        name = "AdamW"
        params = {key: value for key, value in params.items() if key not in ("adam_w_mode", "fp32_optimizer_states")}
    kind = getattr(torch.optim, name, None)
    if isinstance(kind, type):
        optimizer = _tried("optimizer.params: ", lambda: kind(weight, **params))
    elif name not in DEEPSPEED_OPTIMIZERS:
        raise ConfigError(f"optimizer.type = \"{name}\": is neither one of DeepSpeed's nor of torch's")
    name = read.scheduler_name
    if name is not None:
        scheduler = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
        if scheduler is None:
            raise ConfigError(f"scheduler.type = \"{name}\": is neither one of DeepSpeed's nor of torch's")
        _tried("scheduler.params: ", lambda: scheduler(optimizer, **(read.scheduler_params or {})))


def check_removed(settings: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed has removed, by its own check, before it creates anything.

    Raises:
        ConfigError: one line.
    """
    _tried("", lambda: deepspeed_config._reject_removed_config_keys(settings))


def _tried(what: str, make: Callable[[], Any]) -> Any:
    disabled, logger.disabled = logger.disabled, True  # what it logs is logged once more when the engine is built
    try:
        return make()
    except ValidationError as error:
        found = error.errors()[0]
        section = _SECTIONS.get(error.title, error.title)
        key = ".".join([section, *map(str, found["loc"])] if section else map(str, found["loc"]))
        raise ConfigError(f"DeepSpeed refuses {key} = {found['input']!r}: {found['msg']}") from error
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
