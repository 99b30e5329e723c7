"""What ds_dynmo cannot work with is refused here, by name, before anything is created or touched."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import LayerSpec
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.utils import logger
from torch import nn

from ds_dynmo.config import DynMoConfig, parse_type_partition
from ds_dynmo.errors import ConfigError, PartitionError
from ds_dynmo.plan import check_partition

TESTED_DEEPSPEED = "0.19.8"


def load_config(args: Any, config: Any, config_params: Any) -> dict[str, Any]:
    """The DeepSpeed configuration as a dict, wherever ``deepspeed.initialize`` would take it from."""
    source = config if config is not None else config_params
    if source is None:
        source = getattr(args, "deepspeed_config", None)
    if source is None:
        raise ConfigError("no DeepSpeed configuration: pass config=..., or args with deepspeed_config")
    if isinstance(source, dict):
        return source
    try:
        return dict(load_ds_config(os.fspath(source)))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"DeepSpeed configuration {source!r} cannot be read: {error}") from error


def check_deepspeed_version() -> None:
    """Warn if DeepSpeed is not the version whose private parts were read."""
    if deepspeed.__version__ != TESTED_DEEPSPEED:
        logger.warning(
            f"ds_dynmo has been tested with deepspeed {TESTED_DEEPSPEED}, this is {deepspeed.__version__}: moving "
            "layers relies on private parts that may have changed"
        )


def check_module(model: Any) -> None:
    """Refuse what is not a pipeline of DeepSpeed's, or one that cannot be re-partitioned."""
    if isinstance(model, DualPipeVModule):
        raise ConfigError("model is a DualPipeVModule, whose stages hold two ranges of layers: use PipelineModule")
    if not isinstance(model, PipelineModule):
        raise ConfigError(f"model has to be a deepspeed.pipe.PipelineModule, got {type(model).__name__}")
    num_layers, num_stages = len(model._layer_specs), model.num_stages
    if num_stages > num_layers:
        raise PartitionError(f"{num_stages} stages need at least as many layers, the model has {num_layers}")
    check_partition([int(bound) for bound in model.parts], num_layers, num_stages)
    for axis in model.topology().get_axis_names():
        if axis not in ("pipe", "data") and model.topology().get_dim(axis) > 1:
            raise ConfigError(
                f"topology has {model.topology().get_dim(axis)} ranks on its {axis!r} axis: layers can be moved in "
                "pipelines with data parallelism only so far"
            )


def check_training(config: Mapping[str, Any], optimizer: Any) -> None:
    """Refuse precisions, ZeRO stages and optimizers whose state cannot be moved yet."""
    for key in ("fp16", "bf16", "bfloat16", "amp", "torch_autocast"):
        block = config.get(key)
        if isinstance(block, Mapping) and block.get("enabled"):
            raise ConfigError(f"{key}.enabled = true: layers can be moved in fp32 training only so far")
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if stage:
        why = (
            "cannot be combined with pipeline parallelism"
            if stage >= 2
            else "shards optimizer state, which cannot be moved yet"
        )
        raise ConfigError(f"zero_optimization.stage = {stage}: {why}; allowed is 0")
    _check_optimizer(config.get("optimizer"), optimizer)


def _check_optimizer(block: Any, optimizer: Any) -> None:
    if optimizer is None and isinstance(block, Mapping):
        name, parameters = str(block.get("type", "")), block.get("params") or {}
        if name.lower() in ("adam", "adamw"):
            if not parameters.get("torch_adam", False):
                raise ConfigError(
                    f'optimizer.type = "{name}" is DeepSpeed\'s FusedAdam, which counts steps per group and cannot be '
                    'moved yet; use torch\'s: "params": {..., "torch_adam": true}'
                )
        elif not hasattr(torch.optim, name):
            raise ConfigError(
                f'optimizer.type = "{name}" is no optimizer of torch.optim: its state cannot be moved yet'
            )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer is torch.optim.LBFGS, which keeps the state of all parameters in the first one's")
    if isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__module__.startswith("deepspeed."):
        raise ConfigError(
            f"optimizer is DeepSpeed's {type(optimizer).__name__}: its state cannot be moved yet; use torch's"
        )


def layer_name(spec: Any) -> str:
    """The class or function name that ``type:`` patterns are matched against."""
    if isinstance(spec, LayerSpec):
        return str(spec.typename.__name__)
    return type(spec).__name__ if isinstance(spec, nn.Module) else str(getattr(spec, "__name__", ""))


def type_costs(specs: list[Any], text: str) -> list[float]:
    """The weight of each layer under ``"type:<regex>[:weight]|..."``; the first pattern that matches counts.

    Raises:
        ConfigError: a pattern that no layer's name matches.
    """
    rules = parse_type_partition(text)
    names = [layer_name(spec) for spec in specs]
    for pattern, _ in rules:
        if not any(re.search(pattern, name, re.IGNORECASE) for name in names):
            raise ConfigError(
                f"dynmo.initial_partition = {text!r}: no layer's name matches {pattern!r}; "
                f"names are {sorted(set(names))}"
            )
    return [
        next((weight for pattern, weight in rules if re.search(pattern, name, re.IGNORECASE)), 0.0) for name in names
    ]


def check_initial_partition(dynmo: DynMoConfig, model: PipelineModule) -> None:
    """Refuse an initial partition that does not suit the model."""
    partition = dynmo.initial_partition
    if isinstance(partition, str):
        if partition.startswith("type:"):
            type_costs(model._layer_specs, partition)
    elif partition is not None:
        check_partition(partition, len(model._layer_specs), model.num_stages)
