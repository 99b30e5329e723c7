"""What ds_dynmo cannot work with is refused here, by name, before anything is created or touched."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import LayerSpec
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.utils import logger
from torch import nn

from ds_dynmo.config import DynMoConfig, parse_type_partition
from ds_dynmo.engine.comm import Communicator
from ds_dynmo.engine.stage import StageLayers
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
        if axis not in ("pipe", "data", "model") and model.topology().get_dim(axis) > 1:
            raise ConfigError(
                f"topology has {model.topology().get_dim(axis)} ranks on its {axis!r} axis: layers can be moved where "
                "the axes are pipe, data and model"
            )


_REFUSED = {
    "curriculum_learning": "it changes what layers are sent in the middle of a schedule",
    "data_efficiency": "its random layer-token drop and samplers know the layers of the stage that was built",
    "flops_profiler": "it hooks the layers that a stage was built with; engine.profile has seconds per layer",
    "eigenvalue": "it keeps the layers that a stage was built with",
    "progressive_layer_drop": "it is not made for pipelines",
    "compression_training": "it replaces the layers that a stage was built with",
    "hybrid_engine": "it is not made for pipelines",
    "zenflow": "its layout of the state cannot be moved",
}


def check_features(config: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed can do and has not been seen to work across a move."""
    for key, why in _REFUSED.items():
        block = config.get(key)
        inner = block.values() if isinstance(block, Mapping) else ()
        if _enabled(block) or any(_enabled(part) for part in inner) or (key == "compression_training" and block):
            raise ConfigError(f"{key}: {why}; switch it off to move layers")
    if config.get("sparse_gradients"):
        raise ConfigError("sparse_gradients = true: sparse gradients cannot be clipped by the whole model's norm")
    compiles = config.get("compile")
    if isinstance(compiles, Mapping) and compiles.get("deepcompile"):
        raise ConfigError("compile.deepcompile = true: a compiled stage cannot be rebuilt around other layers")
    tensor_parallel = config.get("tensor_parallel")
    if isinstance(tensor_parallel, Mapping) and int(tensor_parallel.get("autotp_size", 0)) > 1:
        raise ConfigError(
            f"tensor_parallel.autotp_size = {tensor_parallel['autotp_size']}: it replaces layers that were built; "
            "use layers that are tensor parallel themselves and PipeModelDataParallelTopology"
        )


def check_partitioned_activations(config: Mapping[str, Any], model: PipelineModule) -> None:
    """Refuse what DeepSpeed 0.19.8 fails or hangs at: splitting only one way's messages over the slices."""
    block = config.get("pipeline")
    block = block if isinstance(block, Mapping) else {}
    pipe, grad = (bool(block.get(key, True)) for key in ("pipe_partitioned", "grad_partitioned"))
    slices = model.topology().get_dim("model")
    if pipe != grad and slices > 1:
        raise ConfigError(
            f"pipeline.pipe_partitioned = {pipe} and pipeline.grad_partitioned = {grad} with {slices} ranks on the "
            "'model' axis: DeepSpeed can split both over the slices or neither; set both to the same"
        )


def check_training(config: Mapping[str, Any], optimizer: Any) -> None:
    """Refuse precisions, ZeRO stages and optimizers whose state cannot be moved."""
    for key in ("fp16", "amp", "torch_autocast"):
        if _enabled(config.get(key)):
            raise ConfigError(f"{key}.enabled = true: layers can be moved in fp32 and bf16 training only")
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage", 0)
    if stage not in (0, 1):
        raise ConfigError(
            f"zero_optimization.stage = {stage}: cannot be combined with pipeline parallelism; allowed are 0 and 1"
        )
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), Mapping) and zero[key].get("device", "none") != "none":
            raise ConfigError(f"zero_optimization.{key}: offloaded state cannot be moved; remove it")
    for key in ("round_robin_gradients", "parameter_alignment", "zenflow", "elastic_checkpoint"):
        if zero.get(key):
            raise ConfigError(
                f"zero_optimization.{key} = {zero[key]!r}: its layout of the state cannot be moved; remove it"
            )
    bf16 = next((config[key] for key in ("bf16", "bfloat16") if _enabled(config.get(key))), None)
    if bf16 is not None:
        for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            if bf16.get(key):
                raise ConfigError(f"bf16.{key} = true: only fp32 master weights and state can be moved; remove it")
    _check_optimizer(config.get("optimizer"), optimizer, flat=bool(stage) or bf16 is not None)


def _enabled(block: Any) -> bool:
    return isinstance(block, Mapping) and bool(block.get("enabled"))


_JSON_OPTIMIZERS = ("adam", "adamw")
_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)


def _check_optimizer(block: Any, optimizer: Any, *, flat: bool) -> None:
    """Refuse by name what keeps state that is not per parameter or, where it is flat, not per element."""
    if optimizer is None and isinstance(block, Mapping):
        name = str(block.get("type", ""))
        if name.lower() in _JSON_OPTIMIZERS:
            return
        kind = getattr(torch.optim, name, None)
        if kind is None:
            raise ConfigError(f'optimizer.type = "{name}" is no optimizer of torch.optim: its state cannot be moved')
        _check_kind(kind, f'optimizer.type = "{name}"', flat)
    elif isinstance(optimizer, torch.optim.Optimizer):
        _check_kind(type(optimizer), f"optimizer is {type(optimizer).__name__}", flat)


def _check_kind(kind: type, named: str, flat: bool) -> None:
    if issubclass(kind, torch.optim.LBFGS):
        raise ConfigError(f"{named}, which keeps the state of all parameters in the first one's")
    if issubclass(kind, FusedAdam | DeepSpeedCPUAdam):
        return
    if kind.__module__.startswith("deepspeed."):
        raise ConfigError(
            f"{named}, whose state cannot be moved; use FusedAdam, DeepSpeedCPUAdam or one of torch.optim"
        )
    if flat and not issubclass(kind, _ELEMENTWISE):
        allowed = ", ".join(sorted(entry.__name__ for entry in _ELEMENTWISE))
        raise ConfigError(
            f"{named}: with bf16 or ZeRO, state lies in flat buffers and only optimizers that treat every element "
            f"alike can be moved: {allowed}, FusedAdam, DeepSpeedCPUAdam"
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


def check_sharing(layers: StageLayers, comm: Communicator) -> None:
    """Refuse layers that share a parameter without being tied: it could not be on two stages. Collective."""
    here = layers.sharing()
    flags = torch.tensor([float(index in here) for index in range(layers.num_layers)])
    shared = comm.max_over_world(flags).nonzero().flatten().tolist()
    if shared:
        raise ConfigError(
            f"layers {shared} share parameters with one another: they could not be on different stages; make them "
            "TiedLayerSpecs of one key"
        )


def check_initial_partition(dynmo: DynMoConfig, model: PipelineModule) -> None:
    """Refuse an initial partition that does not suit the model."""
    partition = dynmo.initial_partition
    if isinstance(partition, str):
        if partition.startswith("type:"):
            type_costs(model._layer_specs, partition)
    elif partition is not None:
        check_partition(partition, len(model._layer_specs), model.num_stages)
