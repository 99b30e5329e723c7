"""One training run as a value, and DeepSpeed's configuration for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

OVERFLOWING = {  # the first steps overflow, and later ones when the scale has grown again
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 17,
    "loss_scale_window": 2,
    "hysteresis": 1,
    "min_loss_scale": 1,
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 buffers": {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}},
    "bf16 immediate": {"bf16": {"enabled": True, "immediate_grad_update": True}},
    "bf16 zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "bf16 zero1 fp32sums": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "fp32 zero1": {"zero_optimization": {"stage": 1}},
    "fp16 zero1": {"fp16": OVERFLOWING, "zero_optimization": {"stage": 1}},
}
STOCK_ALONE = {"fp16": {"fp16": OVERFLOWING}}  # no layer moves
SHAPES: dict[str, dict[str, Any]] = {
    "2 stages": {"stages": 2},
    "3 stages, tied": {"stages": 3, "tied": True},
    "3 stages, 2 replicas, reentrant checkpointing, dropout": {
        "stages": 3,
        "replicas": 2,
        "checkpoint_interval": 1,
        "dropout": True,
    },
    "4 stages, checkpointing": {"stages": 4, "checkpoint_interval": 2, "reentrant": False},
}
SECTION: dict[str, Any] = {}  # defaults for every "dynmo" section on this rank; a case may override them


@dataclass(frozen=True)
class Case:
    """One training run."""

    stages: int = 2
    blocks: int = 5
    tied: bool = False
    clip: float = 1.0
    optimizer: str = "AdamW"
    checkpoint_interval: int = 0
    reentrant: bool = True
    micro_batches: int = 3
    replicas: int = 1
    slices: int | None = None  # tensor-parallel; None: a topology without that axis
    scheduler: bool = False
    groups: str = "one"  # one, two, each: one per parameter, or sparse: a rank without members leaves a group out
    precision: str = "fp32"  # see PRECISIONS and STOCK_ALONE
    dropout: bool = False
    start: tuple[int, ...] | None = None
    dynmo: dict[str, Any] | None = field(default_factory=lambda: {"interval": 0})

    @property
    def num_layers(self) -> int:
        return self.blocks + 3

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas * (self.slices or 1)

    @property
    def topology(self) -> Any:
        """The grid's topology; None: DeepSpeed's default for so many stages."""
        if self.slices is None:
            return None
        return PipeModelDataParallelTopology(num_pp=self.stages, num_mp=self.slices, num_dp=self.replicas)


class UncompiledFusedAdam(FusedAdam):
    """DeepSpeed's FusedAdam with its step in torch: stock fp16 without ZeRO keeps weights flat for no other."""

    def __init__(self, parameters: list[Any]) -> None:
        torch.optim.Optimizer.__init__(self, parameters, {"lr": 0.03, "weight_decay": 0.01})
        self.set_grad_none = True

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for master in group["params"]:
                state = self.state[master]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
                state["step"] += 1
                state["exp_avg"].lerp_(master.grad, 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(master.grad, master.grad, value=0.001)
                scale = (1 - 0.999 ** state["step"]) ** 0.5 / (1 - 0.9 ** state["step"])
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8) * scale
                master.data.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)


def parameter_groups(module: nn.Module, how: str) -> list[Any]:
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    if how == "one":
        return list(module.parameters())
    if how == "each":
        return [{**group, "params": [parameter]} for group in groups for parameter in group["params"]]
    return groups if how == "two" else [group for group in groups if group["params"]]


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 on this rank's CPU: its accelerator says no, but torch computes in it."""
    get_accelerator().is_fp16_supported = lambda: True


def config(case: Case) -> dict[str, Any]:
    if case.precision.startswith("fp16"):
        allow_fp16()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": case.clip,
        "steps_per_print": 10**6,
        "pipeline": {"use_reentrant": case.reentrant},
        **(PRECISIONS | STOCK_ALONE)[case.precision],
    }
    if "zero1" in case.precision and case.optimizer not in ("AdamW", "Adam"):
        settings["zero_allow_untested_optimizer"] = True
    if case.optimizer in ("AdamW", "Adam"):
        settings["optimizer"] = {"type": case.optimizer, "params": {"lr": 0.03, "torch_adam": True}}
    elif case.optimizer == "FusedAdam":
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.03}}
    elif case.optimizer == "SGD":
        settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    if case.scheduler:
        settings["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.05, "warmup_num_steps": 8},
        }
    if case.dynmo is not None:
        settings["dynmo"] = {**SECTION, **case.dynmo}
    return settings


def client_optimizer(case: Case, parameters: list[Any]) -> Any:
    """Make an optimizer, or a function that makes one where this stage trains nothing; None: that of the JSON."""
    if case.optimizer == "Adafactor" and not parameters:
        return lambda groups: torch.optim.Adafactor(groups, lr=0.05)
    if case.optimizer == "Adafactor":
        return torch.optim.Adafactor(parameters, lr=0.05)
    if case.optimizer == "CPUAdam":
        return DeepSpeedCPUAdam(parameters or [{"params": []}], lr=0.03)
    if case.optimizer == "uncompiled FusedAdam":
        return UncompiledFusedAdam(parameters or [{"params": []}])
    if case.optimizer == "client AdamW":
        return torch.optim.AdamW(parameters, lr=0.03)
    return None
