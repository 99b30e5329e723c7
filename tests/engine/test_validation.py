"""What initialize refuses by name, before a process group exists or an optimizer changes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import ds_dynmo
from ds_dynmo.config import DynMoConfig, parse_section
from ds_dynmo.engine import validation
from ds_dynmo.errors import ConfigError, PartitionError

FP16, ZERO_1 = {"fp16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled = true.*accelerator 'cpu'.*bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype = 'float16'.*bfloat16"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype = None"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage = 3.*pipeline"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "round_robin_gradients"),
        ({"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}, "elastic_checkpoint.*files"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam"),
        ({"optimizer": {"type": "LBFGS"}}, "LBFGS"),
        ({"bf16": {"enabled": True}, "optimizer": {"type": "Adafactor"}}, "Adafactor.*every element alike"),
        ({"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adagrad"}}, "Adagrad"),
    ],
)
def test_unsupported_training_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validation.check_training(config, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FP16, **ZERO_1, "optimizer": ADAMW}, None),
        (FP16, 'fp16.enabled = true with zero_optimization.stage = 0.*"stage": 1.*Adafactor.*need fp32'),
        ({**FP16, "zero_optimization": {"stage": 0}}, "fp16.enabled = true with zero_optimization.stage = 0"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
        ({**FP16, **ZERO_1, "optimizer": {"type": "Adafactor"}}, "Adafactor.*alike"),
    ],
)
def test_fp16_where_the_accelerator_has_it(
    config: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        validation.check_training(config, None)


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": ADAMW, "zero_optimization": {"stage": 0}, "bf16": {"enabled": False}},
        {"optimizer": {"type": "SGD"}},
        {"optimizer": {"type": "Adam"}, "bf16": {"enabled": True}},
        {"optimizer": {"type": "RMSprop"}, "zero_optimization": {"stage": 1}},
        {"optimizer": {"type": "Adafactor"}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 1}},
    ],
)
def test_supported_training_is_accepted(config: dict[str, Any]) -> None:
    validation.check_training(config, None)


def data_efficiency(kind: str, feature: str) -> dict[str, Any]:
    return {"data_efficiency": {"enabled": False, kind: {"enabled": False, feature: {"enabled": True}}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (data_efficiency("data_sampling", "curriculum_learning"), "data_sampling.curriculum_learning.*sampler"),
        (data_efficiency("data_routing", "random_ltd"), "data_routing.random_ltd"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler.*engine.profile"),
        ({"autotuning": {"enabled": True}}, "autotuning"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"compile": {"autoep_non_moe": True}}, "compile.autoep_non_moe"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size = 2"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal = true: withdrawn; load it once without"),
    ],
)
def test_unsupported_features_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validation.check_features(config)


@pytest.mark.parametrize(
    "config",
    [
        {"flops_profiler": {"enabled": False}, "compile": {}, "wall_clock_breakdown": True},
        {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "num_workers": 2}}},
    ],
)
def test_supported_features_are_accepted(config: dict[str, Any]) -> None:
    validation.check_features(config)


@pytest.mark.parametrize("key", ["amp", "elasticity"])
def test_features_that_deepspeed_removed_are_refused(key: str) -> None:
    """Enabled or not."""
    with pytest.raises(ConfigError, match=r"^DeepSpeed refuses the configuration: .* has been removed"):
        validation.check_features({key: {"enabled": False}})


def test_activations_partitioned_in_one_direction_only_are_refused() -> None:
    model: Any = SimpleNamespace(topology=lambda: PipeModelDataParallelTopology(2, 2, 1))
    validation.check_partitioned_activations(
        {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}, model
    )
    validation.check_partitioned_activations({}, model)
    with pytest.raises(ConfigError, match="grad_partitioned = False with 2 ranks"):
        validation.check_partitioned_activations({"pipeline": {"grad_partitioned": False}}, model)


def test_unsupported_optimizers_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    validation.check_training({}, torch.optim.Adafactor([parameter]))
    with pytest.raises(ConfigError, match="LBFGS"):
        validation.check_training({}, torch.optim.LBFGS([parameter]))
    for kind in (torch.optim.Adafactor, torch.optim.Rprop):  # not element-wise; state that does not begin with zeros
        validation.check_training({}, kind([parameter]))
        with pytest.raises(ConfigError, match=kind.__name__):
            validation.check_training({"bf16": {"enabled": True}}, kind([parameter]))


def test_wrong_arguments_are_refused_before_a_process_group_exists() -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError, match="PipelineModule, got Linear"):
        ds_dynmo.initialize(model=nn.Linear(1, 1), config={"dynmo": {}, "optimizer": ADAMW})
    with pytest.raises(ConfigError, match="no DeepSpeed configuration"):
        ds_dynmo.initialize(model=nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"dynmo\.intervall.*interval"):
        ds_dynmo.initialize(model=nn.Linear(1, 1), config={"dynmo": {"intervall": 1}})
    with pytest.raises(ConfigError, match=r"/does/not/exist\.json"):
        ds_dynmo.initialize(model=nn.Linear(1, 1), args=SimpleNamespace(deepspeed_config="/does/not/exist.json"))
    assert not torch.distributed.is_initialized()


def embed() -> None: ...


SPECS: list[Any] = [embed, LayerSpec(nn.Linear, 1, 1), LayerSpec(nn.Linear, 1, 1), nn.LayerNorm(1)]


def test_type_costs_count_layers_by_name() -> None:
    assert validation.type_costs(SPECS, "type:embed:2|linear|norm:0.5") == [2.0, 1.0, 1.0, 0.5]
    assert validation.type_costs(SPECS, "type:linear:3") == [0.0, 3.0, 3.0, 0.0]
    with pytest.raises(ConfigError, match="no layer's name matches 'attention'"):
        validation.type_costs(SPECS, "type:attention")


def test_an_initial_partition_that_does_not_fit_the_model_is_refused() -> None:
    model: Any = SimpleNamespace(_layer_specs=SPECS, num_stages=2)
    for partition in ([0, 2, 4], "uniform", "type:linear"):
        validation.check_initial_partition(parse_section(DynMoConfig, {"initial_partition": partition}, "dynmo"), model)
    with pytest.raises(PartitionError, match="4 layers"):
        validation.check_initial_partition(parse_section(DynMoConfig, {"initial_partition": [0, 2, 5]}, "dynmo"), model)
