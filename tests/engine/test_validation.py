"""What initialize refuses by name, before a process group exists or an optimizer changes."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import ds_dynmo
from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine import validation
from ds_dynmo.engine.deepspeed.settings import check_settings
from ds_dynmo.engine.initialization import check_configuration
from ds_dynmo.errors import ConfigError, PartitionError

FP16, ZERO_1 = {"fp16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}


TRAINING: list[tuple[dict[str, Any], str | None]] = [  # what the error says; None: it is accepted
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype = 'float16'.*bfloat16"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype = None"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
    ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "round_robin_gradients"),
    ({"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}, "elastic_checkpoint.*files"),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
    ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam"),
    ({"optimizer": {"type": "LBFGS"}}, "LBFGS"),
    ({"bf16": {"enabled": True}, "optimizer": {"type": "Adafactor"}}, "Adafactor.*every element alike"),
    ({"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adagrad"}}, "Adagrad"),
    (FP16, 'fp16.enabled = true with zero_optimization.stage = 0.*"stage": 1.*Adafactor.*need fp32'),
    ({**FP16, "zero_optimization": {"stage": 0}}, "fp16.enabled = true with zero_optimization.stage = 0"),
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
    ({**FP16, **ZERO_1, "optimizer": {"type": "Adafactor"}}, "Adafactor.*alike"),
    ({**FP16, **ZERO_1, "optimizer": ADAMW}, None),
    ({"optimizer": ADAMW, "zero_optimization": {"stage": 0}, "bf16": {"enabled": False}}, None),
    ({"optimizer": {"type": "SGD"}}, None),
    ({"optimizer": {"type": "Adam"}, "bf16": {"enabled": True}}, None),
    ({"optimizer": {"type": "RMSprop"}, "zero_optimization": {"stage": 1}}, None),
    ({"optimizer": {"type": "Adafactor"}}, None),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 1}}, None),
]


@pytest.mark.parametrize(("config", "message"), TRAINING)
def test_unsupported_training_is_refused(config: dict[str, Any], message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
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
        ({"flops_profiler": {"enabled": False}, "compile": {}, "wall_clock_breakdown": True}, None),
        ({"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "num_workers": 2}}}, None),
    ],
)
def test_unsupported_features_are_refused(config: dict[str, Any], message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        validation.check_features(config)


@pytest.mark.parametrize("key", ["amp", "elasticity"])
def test_features_that_deepspeed_removed_are_refused(key: str) -> None:
    """Enabled or not."""
    with pytest.raises(ConfigError, match=r"^DeepSpeed refuses the configuration: .* has been removed"):
        check_settings({key: {"enabled": False}})


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (optimizer("Adamm"), 'optimizer.type = "Adamm": neither .*; did you mean "Adam"?'),
        (optimizer("sgd"), 'optimizer.type = "sgd": neither .*; did you mean "SGD"?'),
        (optimizer("CPUAdam"), 'optimizer.type = "CPUAdam": neither .*; did you mean "Adam"?'),
        (optimizer("zzz"), 'optimizer.type = "zzz": neither .*; should be one of .*AdamW.*'),
        ({"optimizer": {"typ": "Adam"}}, 'optimizer.typ = "Adam": unknown key; did you mean "type"?'),
        ({"optimizer": {"type": "Adam", "parms": {}}}, 'optimizer.parms = {}: unknown key; did you mean "params"?'),
        ({"optimizer": {"type": "Adam", "lr": 0.1}}, 'optimizer.lr = 0.1: is a parameter, .*: "params": {"lr": 0.1}'),
        ({"optimizer": {"params": {}}}, "optimizer.type = null: should be a name.*"),
        (optimizer("Adam", beta=[0.9, 0.99]), 'optimizer.params.beta = .*: FusedAdam has no .*did you mean "betas"?'),
        (optimizer("Adam", torch_adm=True), 'optimizer.params.torch_adm = true: .*; did you mean "torch_adam"?'),
        (optimizer("AdamW", torch_adam=True, weight_decy=0), '.*weight_decy = 0: AdamW has .* "weight_decay"?'),
        (optimizer("SGD", momentun=0.9), 'optimizer.params.momentun = 0.9: SGD has no .* did you mean "momentum"?'),
        (optimizer("adagrad", lr_deca=0.9), 'optimizer.params.lr_deca = 0.9: Adagrad .* did you mean "lr_decay"?'),
        (optimizer("SGD", max_grad_norm=1.0), '.*max_grad_norm = 1.0: SGD .*by the top-level key "gradient_clipping"'),
        (optimizer("AdamW", lr="1e-3"), 'optimizer.params.lr = "1e-3": is a string, should be a number: 0.001'),
        (optimizer("AdamW", torch_adam=True, lr="1e-3"), 'optimizer.params.lr = "1e-3": .*: 0.001'),
        (optimizer("AdamW", lr="auto"), 'optimizer.params.lr = "auto": should be a number, such as 0.001'),
        (optimizer("AdamW", lr=None), "optimizer.params.lr = null: should be a number, such as 0.001"),
        (optimizer("Adam", betas=[0.9, "0.99x"]), r'optimizer.params.betas.1. = "0.99x": should be a number, .*'),
        (scheduler("WarmupLR", warmup_max_lr="3e-4"), 'scheduler.params.warmup_max_lr = "3e-4": .*: 0.0003'),
        (scheduler("WarmupDecayLR", total_num_steps="9"), 'scheduler.params.total_num_steps = "9": is a string, .*'),
        ({"gradient_clipping": "1.0x"}, 'gradient_clipping = "1.0x": should be a number of at least 0'),
        ({"train_batch_size": "auto"}, 'train_batch_size = "auto": should be an int of at least 1'),
        ({"steps_per_print": "10"}, 'steps_per_print = "10": should be a number other than 0'),
        ({"steps_per_print": 0}, "steps_per_print = 0: should be a number other than 0"),
        (optimizer("SGD", lr=-1.0), "DeepSpeed refuses .* optimizer.params: Invalid learning rate: -1.0"),
        (scheduler("WarmupLr"), 'scheduler.type = "WarmupLr": neither .*; did you mean "WarmupLR"?'),
        (scheduler("StepLr", step_size=3), 'scheduler.type = "StepLr": neither .*; did you mean "StepLR"?'),
        (scheduler("logger"), 'scheduler.type = "logger": neither .*; should be one of .*'),
        ({"scheduler": {"type": "WarmupLR", "parms": {}}}, '.*parms = {}: unknown key; did you mean "params"?'),
        ({"scheduler": None}, "scheduler = null: should be an object"),
        ({"scheduler": {"params": {}}}, "scheduler.type = null: should be a name.*"),
        (scheduler("WarmupLR", warmup_num_step=3), '.*warmup_num_step = 3: WarmupLR .*mean "warmup_num_steps"?'),
        (scheduler("StepLR", stepsize=3), '.*stepsize = 3: StepLR has no .*; did you mean "step_size"?'),
        (scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps: is required by WarmupDecayLR"),
        (scheduler("WarmupLR", warmup_num_steps=-1), "DeepSpeed refuses .* scheduler.params: warmup_num_steps must .*"),
        ({"fp16": {"enabled": True}}, "fp16.enabled = true: DeepSpeed's accelerator 'cpu' .*; use bf16 or fp32"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage = 2: cannot be combined with pipeline .*"),
        ({"zero_optimization": {"stge": 1}}, 'zero_optimization.stge = 1: unknown key; did you mean "stage"?'),
        ({"bf16": {"enable": True}}, 'bf16.enable = true: unknown key; did you mean "enabled"?'),
        ({"bfloat16": {"enable": True}}, "DeepSpeed refuses the configuration: .*DeepSpeedBF16Config enable .*"),
        ({"csv_monitor": {"jobname": "a"}}, 'csv_monitor.jobname = "a": unknown key; did you mean "job_name"?'),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage = 7: should be 0, 1, 2, .*"),
    ],
)
def test_names_that_deepspeed_does_not_know_get_a_suggestion(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message.replace('?', '[?]')}$"):
        check_settings(config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        optimizer("Lamb", max_coeff=10.0),
        optimizer("adam", lr=0.1, adam_w_mode=False, fp32_optimizer_states=True, bias_correction=False),
        optimizer("AdamW", torch_adam=True, foreach=False),
        {**optimizer("Adam"), **scheduler("WarmupLR", warmup_min_lr=[0.0, 0.0], warmup_max_lr=[0.1, 0.2])},
        scheduler("MultiStepLR", milestones=[2, 3]),
        {"optimizer": {"type": "SGD", "legacy_fusion": True}},
        {"optimizer": {"type": "AdamW", "no_wd_kws": ["bias"]}},  # a program's own key
        scheduler("WarmupLR", warmup_type="linear"),
        {"steps_per_print": float("inf"), "gradient_clipping": numpy.float64(1.0), "train_batch_size": numpy.int64(8)},
    ],
)
def test_what_deepspeed_knows_is_accepted(config: dict[str, Any]) -> None:
    check_settings(config)


@pytest.mark.parametrize(
    ("section", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)
def test_a_monitor_without_its_package_is_refused(section: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=f"^{section}.enabled = true: .* not installed: pip install {package}, or set"
    ):
        check_settings({section: {"enabled": True}})
    check_settings({section: {"enabled": False}})
    monkeypatch.setenv("RANK", "1")  # which writes nothing
    check_settings({section: {"enabled": True}})


def test_an_optimizer_and_a_scheduler_of_your_own_take_the_place_of_the_configurations() -> None:
    mine = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    config = {**optimizer("Adamm"), **scheduler("StepLr")}
    check_configuration(DynMoConfig(), config, mine, torch.optim.lr_scheduler.StepLR(mine, 3))
    with pytest.raises(ConfigError, match=r"scheduler\.type"):
        check_configuration(DynMoConfig(), config, mine)
    with pytest.raises(ConfigError, match=r"optimizer\.type"):
        check_configuration(DynMoConfig(), config)


def test_activations_partitioned_in_one_direction_only_are_refused() -> None:
    model: Any = SimpleNamespace(topology=lambda: PipeModelDataParallelTopology(2, 2, 1))
    validation.check_partitioned_activations(
        {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}, model
    )
    validation.check_partitioned_activations({}, model)
    with pytest.raises(ConfigError, match="grad_partitioned = False with 2 ranks"):
        validation.check_partitioned_activations({"pipeline": {"grad_partitioned": False}}, model)


@pytest.mark.parametrize("flat", [False, True])
def test_optimizers_that_a_refusal_names_are_accepted(flat: bool) -> None:
    config = {"bf16": {"enabled": flat}}
    with pytest.raises(ConfigError) as error:
        validation.check_training({**config, "optimizer": {"type": "Lamb"}}, None)
    said, _, objects = str(error.value).partition("; given as objects, ")
    refused, _, names = said.partition("; allowed are ")
    assert refused == 'optimizer.type = "Lamb", whose state cannot be moved' and objects.startswith("FusedAdam and ")
    if not flat:
        assert names == "torch's but LBFGS and Muon"
        kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
        names = ", ".join(kinds - {"LBFGS", "Muon"})
    for name in names.split(", "):
        validation.check_training({**config, "optimizer": {"type": name}}, None)


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
    for partition in ([0, 2, 4], "uniform", "type:linear"):
        validation.check_initial_partition(DynMoConfig(initial_partition=partition), SPECS, 2)
    needed = r"should be 3 boundaries, from 0 to 4, for 2 stages and 4 layers"
    for partition in ([0, 2, 5], [0, 4], [0, 1, 2, 9]):
        named = f"dynmo.initial_partition: partition {partition}: "
        with pytest.raises(PartitionError, match=re.escape(named + needed)):
            validation.check_initial_partition(DynMoConfig(initial_partition=partition), SPECS, 2)


@pytest.mark.parametrize("compiles", [torch.jit.script, lambda layer: layer.compile() or layer])
def test_layers_that_can_never_move_are_refused(compiles: Any) -> None:
    stage: Any = nn.Sequential(nn.Linear(1, 1), nn.Sequential(compiles(nn.Linear(1, 1))))
    stage._layer_specs, stage._local_start, stage._local_stop = SPECS[1:3], 0, 2
    with pytest.raises(ConfigError, match=r'^layer 1 \(Sequential\): 0 .*was compiled by .*"compile": true'):
        validation.check_layers(stage, flat=False, sums_whole=None)
