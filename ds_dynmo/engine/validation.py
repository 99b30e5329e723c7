"""Refuse by name what ds_dynmo cannot work with, before anything is created or touched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynmo.config import DynMoConfig, load_settings, parse_type_partition
from ds_dynmo.config.withdrawn import LOAD_UNIVERSAL, refusal
from ds_dynmo.engine.comm.replicas import has_per_replica
from ds_dynmo.engine.deepspeed.module import has_deepspeeds_experts, layer_specs, layers_of_stage, modules_of
from ds_dynmo.engine.deepspeed.pipeline_module import is_dual_pipe_v, num_stages_of, placement_of
from ds_dynmo.engine.deepspeed.settings import optimizer_class
from ds_dynmo.engine.deepspeed.ties import check_tied_weights
from ds_dynmo.engine.run.compiled_layers import check_not_compiled
from ds_dynmo.errors import ConfigError, PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.placement import Placement, Shape, owners_of


def load_config(args: Any, config: Any, config_params: Any) -> dict[str, Any]:
    """Read the DeepSpeed configuration from where ``deepspeed.initialize`` would, as a dict."""
    source = config if config is not None else config_params
    if source is None:
        source = getattr(args, "deepspeed_config", None)
    if source is None:
        raise ConfigError("no DeepSpeed configuration: pass config=..., or args with deepspeed_config")
    return load_settings(source)


def check_module(model: Any) -> None:
    """Refuse a model that is not DeepSpeed's ``PipelineModule``, or cannot be re-partitioned."""
    if not isinstance(model, PipelineModule):
        raise ConfigError(f"model has to be a deepspeed.pipe.PipelineModule, got {type(model).__name__}")
    placement_of(model)
    for axis in model.topology().get_axis_names():
        if axis not in ("pipe", "data", "model") and model.topology().get_dim(axis) > 1:
            raise ConfigError(
                f"topology has {model.topology().get_dim(axis)} ranks on its {axis!r} axis: layers can be moved where "
                "the axes are pipe, data and model"
            )


_REFUSED = {
    # The first two end in DeepSpeedEngine.step (runtime/engine.py:3643), which a pipeline does not call.
    "flops_profiler": "a pipeline never reaches the code that prints it; engine.profile has seconds per layer",
    "autotuning": "a pipeline never reaches the code that ends an experiment and writes its result",
    "hybrid_engine": "DeepSpeed builds no hybrid engine for a pipeline, without saying so",
    "expert_parallel": "it replaces layers by others, whose experts differ from rank to rank",
}
# These flags alone switch both on, whatever the sections around them say (runtime/data_pipeline/config.py).
_REFUSED_DATA_EFFICIENCY = {
    ("data_sampling", "curriculum_learning"): (
        "its sampler broadcasts from rank 0 in groups of one stage, and all but the first stage's fail; "
        "let a sampler of your own choose the samples (dynamic_shape lets their length change)"
    ),
    ("data_routing", "random_ltd"): (
        "it counts its layers on each stage alone, and a layer keeps the schedule of the stage that it was built on"
    ),
}


def check_features(config: Mapping[str, Any]) -> None:
    """Refuse features that do not work in a pipeline whose layers move."""
    for key, why in _REFUSED.items():
        if _enabled(config.get(key)):
            raise ConfigError(f"{key}.enabled = true: {why}; switch it off")
    for (kind, feature), why in _REFUSED_DATA_EFFICIENCY.items():
        section = config.get("data_efficiency")
        for key in (kind, feature):
            section = section.get(key) if isinstance(section, Mapping) else None
        if _enabled(section):
            raise ConfigError(f"data_efficiency.{kind}.{feature}.enabled = true: {why}; switch it off")
    checkpoint = config.get("checkpoint")
    if isinstance(checkpoint, Mapping) and checkpoint.get("load_universal"):
        raise ConfigError(refusal(LOAD_UNIVERSAL))
    compiles = config.get("compile")
    if isinstance(compiles, Mapping) and compiles.get("deepcompile"):
        raise ConfigError("compile.deepcompile = true: a compiled stage cannot be rebuilt around other layers")
    if isinstance(compiles, Mapping) and compiles.get("autoep_non_moe"):
        raise ConfigError("compile.autoep_non_moe = true: DeepSpeed does not support it in pipelines; remove it")
    tensor_parallel = config.get("tensor_parallel")
    if isinstance(tensor_parallel, Mapping) and int(tensor_parallel.get("autotp_size", 0)) > 1:
        raise ConfigError(
            f"tensor_parallel.autotp_size = {tensor_parallel['autotp_size']}: it replaces layers that were built; "
            "use layers that are tensor parallel themselves and PipeModelDataParallelTopology"
        )


def check_partitioned_activations(config: Mapping[str, Any], model: PipelineModule) -> None:
    """Refuse to split only one direction's messages over tensor-parallel slices: DeepSpeed 0.19.8 fails or hangs."""
    section = config.get("pipeline")
    section = section if isinstance(section, Mapping) else {}
    pipe, grad = (bool(section.get(key, True)) for key in ("pipe_partitioned", "grad_partitioned"))
    slices = model.topology().get_dim("model")
    if pipe != grad and slices > 1:
        raise ConfigError(
            f"pipeline.pipe_partitioned = {pipe} and pipeline.grad_partitioned = {grad} with {slices} ranks on the "
            "'model' axis: DeepSpeed can split both over the slices or neither; set both to the same"
        )


def check_layers(model: PipelineModule, *, flat: bool, sums_whole: str | None) -> None:
    """Refuse layers of this stage that cannot be moved.

    Args:
        flat: gradients are kept in flat buffers (bf16, ZeRO-1).
        sums_whole: the key of ZeRO's by which it sums every gradient over all replicas.

    Raises:
        ConfigError: saying why.
    """
    if has_deepspeeds_experts(model):
        raise ConfigError(
            "layers with experts of deepspeed.moe cannot be moved: they keep process groups, and every data-parallel "
            "rank holds other experts, whose gradients are not those of its replicas"
        )
    if sums_whole and has_per_replica(model):
        raise ConfigError(
            f"zero_optimization.{sums_whole} = false with layers of which every data-parallel replica holds others "
            "(moe.expert_parallel): their gradients would be summed with one another; allowed is true, the default"
        )
    for number, layer in modules_of(model, layers_of_stage(model)):
        try:
            check_not_compiled(layer)
        except TypeError as error:
            raise ConfigError(f"layer {number} ({type(layer).__name__}): {error}") from error
    sparse = {id(module) for module in model.modules() if _has_sparse_gradients(module)}
    if sparse and flat:
        raise ConfigError("nn.Embedding(sparse=True) with bf16 or ZeRO: DeepSpeed takes no sparse gradients there")
    check_tied_weights(model)
    for key, module in model.tied_modules.items():
        ways = {spec.forward_fn for spec in layer_specs(model) if _is_use(spec, key)}
        if len(ways) > 1 and any(id(part) in sparse for part in module.modules()):
            raise ConfigError(
                f"nn.Embedding(sparse=True) in layers tied by the key {key!r} whose forward_fn differ: "
                "DeepSpeed hangs at the sum of a sparse and a dense gradient"
            )


def _has_sparse_gradients(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def _is_use(spec: Any, key: str) -> bool:
    return isinstance(spec, TiedLayerSpec) and str(spec.key) == str(key)


_OF_RANK_0 = ("report", "log", "monitor")  # keys of the "dynmo" section that count on rank 0 only


def check_section(of_this_rank: DynMoConfig, of_rank_0: DynMoConfig) -> None:
    """Refuse a "dynmo" section that differs from rank 0's: ranks would decide differently.

    Raises:
        ConfigError: naming the key and both values.
    """
    for key in DynMoConfig.model_fields:
        here, there = getattr(of_this_rank, key), getattr(of_rank_0, key)
        if key == "trace" and here is not None and there is not None:  # only rank 0's path counts
            here, there = here.steps, there.steps
        if key not in _OF_RANK_0 and here != there:
            raise ConfigError(f"dynmo.{key} = {here!r} here, on rank 0 {there!r}: it has to be the same on every rank")


_BF16_NAMES = ("bfloat16", "bf16", "torch.bfloat16")


def check_training(config: Mapping[str, Any], optimizer: Any) -> None:
    """Refuse precisions, forms of ZeRO and optimizers whose state cannot be moved."""
    autocast = config.get("torch_autocast")
    if isinstance(autocast, Mapping) and _enabled(autocast) and autocast.get("dtype") not in _BF16_NAMES:
        raise ConfigError(
            f"torch_autocast.dtype = {autocast.get('dtype')!r}: in fp16 every stage would scale its loss by itself; "
            f"allowed are {', '.join(_BF16_NAMES)}, or an fp16 section in its place"
        )
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage", 0)
    if _enabled(config.get("fp16")):
        _check_fp16(config["fp16"], stage)
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), Mapping) and zero[key].get("device", "none") != "none":
            raise ConfigError(f"zero_optimization.{key}: offloaded state cannot be moved; remove it")
    if zero.get("elastic_checkpoint"):
        raise ConfigError(
            "zero_optimization.elastic_checkpoint = true: its files have another layout, which cannot be read here; "
            "remove it: checkpoints load with any number of replicas without it"
        )
    for key in ("round_robin_gradients", "parameter_alignment", "zenflow"):
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


def _enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def _check_fp16(section: Mapping[str, Any], zero_stage: int) -> None:
    """Refuse forms of fp16 whose state cannot be moved."""
    if section.get("fp16_master_weights_and_grads"):
        raise ConfigError(
            "fp16.fp16_master_weights_and_grads = true: only fp32 master weights and state can be moved; remove it"
        )
    if zero_stage != 1:
        raise ConfigError(
            f"fp16.enabled = true with zero_optimization.stage = {zero_stage}: fp16 state can be moved under ZeRO-1 "
            'only; set "zero_optimization": {"stage": 1}, with one replica too. Optimizers that mix the elements of a '
            "tensor, such as Adafactor, need fp32"
        )


_ELEMENTWISE = (  # treat every element alike and begin with a state of zeros (Rprop begins with the learning rate)
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


def _check_optimizer(section: Any, optimizer: Any, *, flat: bool) -> None:
    """Refuse, before anything is built, an optimizer that :func:`check_optimizer` would refuse later."""
    if section is not None:
        named, kind = f'optimizer.type = "{section["type"]}"', optimizer_class(section)
        if kind is None:
            raise ConfigError(f"{named}, whose state cannot be moved; {_allowed(flat)}")
        _check_kind(kind, named, flat)
    elif isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer(optimizer, flat=flat)


def check_optimizer(optimizer: torch.optim.Optimizer, *, flat: bool) -> None:
    """Refuse an optimizer whose state cannot be moved.

    Args:
        flat: state will lie in flat buffers (bf16, ZeRO-1).

    Raises:
        ConfigError: naming its class.
    """
    _check_kind(type(optimizer), f"optimizer is {type(optimizer).__name__}", flat)


def not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """Say why elements of its parameters cannot be left out, with their state; None: they can be.

    An optimizer has to treat every element alike, whatever the shape of its parameter.
    """
    alike = (*_ELEMENTWISE, torch.optim.Adagrad, torch.optim.Rprop, FusedAdam, DeepSpeedCPUAdam)
    if isinstance(optimizer, alike):
        return None
    allowed = ", ".join(sorted(kind.__name__ for kind in alike))
    return (
        f"optimizer is {type(optimizer).__name__}, which may treat elements by their rows or matrices: those of its "
        f"parameters cannot be left out; they can be under {allowed}"
    )


def _check_kind(kind: type, named: str, flat: bool) -> None:
    if issubclass(kind, torch.optim.LBFGS):
        raise ConfigError(f"{named}, which keeps the state of all parameters in the first one's")
    if issubclass(kind, FusedAdam | DeepSpeedCPUAdam):
        return
    if kind.__module__.startswith("deepspeed."):
        raise ConfigError(f"{named}, whose state cannot be moved; {_allowed(flat)}")
    if flat and not issubclass(kind, _ELEMENTWISE):
        raise ConfigError(
            f"{named}: with bf16 or ZeRO, state lies in flat buffers and only optimizers that treat every element "
            f"alike and begin at zero can be moved; {_allowed(flat)}"
        )


def _allowed(flat: bool) -> str:
    """List the optimizers that :func:`_check_kind` accepts, as ``optimizer.type`` names them, and those to give."""
    of_torch = ", ".join(sorted(kind.__name__ for kind in _ELEMENTWISE)) if flat else "torch's but LBFGS and Muon"
    return f"allowed are {of_torch}; given as objects, FusedAdam and DeepSpeedCPUAdam too"


def layer_name(spec: Any) -> str:
    """Return the class or function name that ``type:`` patterns are matched against."""
    if isinstance(spec, LayerSpec):
        return str(spec.typename.__name__)
    return type(spec).__name__ if isinstance(spec, nn.Module) else str(getattr(spec, "__name__", ""))


def type_costs(specs: list[Any], text: str) -> list[float]:
    """Weigh each layer under ``"type:<regex>[:weight]|..."``; the first pattern that matches counts.

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


def layer_groups(dynmo: DynMoConfig, specs: list[Any], num_stages: int) -> LayerGroups:
    """Group the layers that ``dynmo.keep_together`` keeps on one stage.

    Raises:
        ConfigError: a rule that does not fit the model, or fewer groups than stages, or than chunks of layers.
    """
    groups = LayerGroups.of(dynmo.keep_together, [layer_name(spec) for spec in specs])
    shape = shape_of(dynmo, num_stages)
    chunks, name = len(owners_of(shape, num_stages)), "stage" if shape == "chain" else "chunk"
    if (problem := groups.shortage(chunks, name)) is not None:
        raise ConfigError(problem)
    return groups


def check_initial_partition(dynmo: DynMoConfig, specs: list[Any], num_stages: int) -> None:
    """Refuse an initial partition that does not fit the model, or cuts what ``dynmo.keep_together`` keeps together."""
    groups, partition = layer_groups(dynmo, specs, num_stages), dynmo.initial_partition
    if isinstance(partition, str):
        if partition.startswith("type:"):
            type_costs(specs, partition)
    elif partition is not None:
        shape = shape_of(dynmo, num_stages)
        try:
            placement = Placement.of_shape(shape, partition, num_layers=len(specs), num_stages=num_stages)
            groups.check(placement.boundaries)
        except PartitionError as error:
            raise PartitionError(f"dynmo.initial_partition: {error}") from error


def shape_of(dynmo: DynMoConfig, num_stages: int) -> Shape:
    """Return the shape of the placements that ``dynmo.schedule.kind`` asks for."""
    kind = dynmo.schedule.kind
    return kind if kind in ("v", "loop") and num_stages > 1 else "chain"


def check_shapes(dynmo: DynMoConfig, model: PipelineModule) -> None:
    """Refuse two chunks per stage where messages between them may change their shapes, or the section has one.

    Raises:
        ConfigError: saying what to set.
    """
    if is_dual_pipe_v(model):
        if type(model) is not DualPipeVModule:
            raise ConfigError(
                f"model is a {type(model).__name__}, a subclass of DualPipeVModule: use a PipelineModule with "
                'dynmo.schedule.kind = "v"'
            )
        if dynmo.schedule.kind not in ("v", "auto"):
            raise ConfigError(
                f'dynmo.schedule.kind = "{dynmo.schedule.kind}": the model is a DualPipeVModule, with two chunks of '
                'layers per stage: set it to "v" or "auto", or use PipelineModule'
            )
    has_pairs = is_dual_pipe_v(model) or shape_of(dynmo, num_stages_of(model)) != "chain"
    if has_pairs and (why := why_one_chunk(dynmo, model.dynamic_shape)):
        raise ConfigError(f'dynmo.schedule.kind = "{dynmo.schedule.kind}": {why}')


def why_one_chunk(dynmo: DynMoConfig, dynamic_shape: bool) -> str | None:
    """Return why a stage cannot hold two chunks of layers; None: it can.

    Args:
        dynamic_shape: of the PipelineModule.
    """
    if dynamic_shape:
        return (
            "two chunks of layers per stage need messages of one shape, and the PipelineModule has dynamic_shape=True: "
            "use one chunk per stage, or pad to one shape"
        )
    if dynmo.schedule.kind == "1f1b":
        return (
            'two chunks of layers per stage have no order of passes under dynmo.schedule.kind = "1f1b": set it to "v" '
            'or "loop", or use one chunk per stage'
        )
    return None
