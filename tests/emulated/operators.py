"""Operators that DeepSpeed compiles for an accelerator: FusedAdam in torch, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import OpBuilder


def multi_tensor_adam(
    chunk_size: int,
    overflow: torch.Tensor,
    lists: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take a step of Adam in place, as DeepSpeed's operator of this name.

    Args:
        lists: gradients, parameters, first and second moments.
        decoupled: 1: AdamW; 0: weight decay is added to the gradient.
    """
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for gradient, parameter, first, second in zip(*lists, strict=True):
        gradient, weight = gradient.float(), parameter.float()
        if not decoupled:
            gradient = gradient + weight_decay * weight
        first.copy_(beta1 * first.float() + (1 - beta1) * gradient)
        second.copy_(beta2 * second.float() + (1 - beta2) * gradient * gradient)
        update = first.float() / correction1 / ((second.float() / correction2).sqrt() + eps)
        if decoupled:
            update = update + weight_decay * weight
        parameter.copy_(weight - lr * update)


class Operator(OpBuilder):
    """An operator by the name of DeepSpeed's class that builds it. Nothing is compiled."""

    NAME = "operator of the emulated device"

    def __init__(self) -> None:
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        return f"tests.emulated.operators.{self.NAME}"

    def sources(self) -> list[str]:
        return []

    def load(self, verbose: bool = True) -> Any:
        if self.NAME == "FusedAdamBuilder":
            return SimpleNamespace(multi_tensor_adam=multi_tensor_adam)
        raise NotImplementedError(f"{self.NAME}: of DeepSpeed's operators, the emulated device has FusedAdam alone")


def builder_of(class_name: str) -> type[Operator]:
    """Return the class that DeepSpeed takes for its builder ``class_name``."""
    return type(class_name, (Operator,), {"NAME": class_name})
