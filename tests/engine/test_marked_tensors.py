"""Tensors on which a program set attributes that hide torch's methods train, move, are saved and loaded as others."""

from __future__ import annotations

import inspect
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from tests.support.configs import Case
from tests.support.harness import run_each
from tests.support.models import WIDTH, Block, Embedding, seeded
from tests.support.training import batches, build, check_moves_changed_nothing, layers_of, outcome_of

pytestmark = pytest.mark.ranks

CALLED_BY_STOCK = {  # by DeepSpeed, and by torch's modules and optimizers, of parameters
    "fp32": {"to", "is_floating_point", "numel", "detach", "copy_", "add_", "mul_", "addcdiv_"},
    "bf16 zero1": {
        *("to", "is_floating_point", "numel", "detach", "copy_"),
        *("data_ptr", "view_as", "narrow", "flatten", "register_post_accumulate_grad_hook"),
    },
}
OF_OUTPUTS = {"register_hook"}
METHODS = [
    name
    for name in dir(torch.Tensor)
    if not name.startswith("_") and not inspect.isdatadescriptor(inspect.getattr_static(torch.Tensor, name))
]


def mark(tensor: torch.Tensor, called: Set[str]) -> torch.Tensor:
    """Hide the methods of a tensor, as Megatron's ``bias.stride = 1`` hides one, except those that are ``called``."""
    vars(tensor).update((name, 1) for name in METHODS if name not in called)
    return tensor


class MarkedBlock(Block):
    """A block of which every tensor is marked: parameters, buffers, attributes, what it returns."""

    def __init__(self, index: int, called: Set[str]) -> None:
        super().__init__(index)
        self.called = called
        self.register_buffer("scale", torch.ones(WIDTH))
        self.shift = torch.zeros(WIDTH)
        for tensor in (*self.parameters(), self.scale, self.shift):
            mark(tensor, called)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(hidden) * self.scale.to(hidden.dtype) + self.shift.to(hidden.dtype)
        return mark(outputs, self.called | OF_OUTPUTS)


class Head(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((11, WIDTH), seed))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight)


def specs(case: Case) -> list[Any]:
    called = frozenset(CALLED_BY_STOCK[case.precision])
    return [LayerSpec(Embedding, 1), *[LayerSpec(MarkedBlock, index, called) for index in range(4)], LayerSpec(Head, 2)]


def train(case: Case, folder: str, moves: bool) -> dict[str, Any]:
    engine = build(case, specs)
    data, losses = batches(engine), []
    for partition in ([0, 1, 6], [0, 4, 6], [0, 2, 6]):
        losses.append(engine.train_batch(data).item())
        if moves:
            engine.rebalance(partition, background=partition[1] == 4)
    losses.append(engine.train_batch(data).item())
    if moves:
        engine.save_checkpoint(folder, "marked")
        assert engine.load_checkpoint(folder, "marked")[0] is not None
    losses.append(engine.train_batch(data).item())
    for layer in layers_of(engine).values():
        if isinstance(layer, MarkedBlock):
            assert all(vars(parameter)["stride"] == 1 for parameter in layer.parameters())
    return outcome_of(engine, losses)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16 zero1"])
def test_attributes_may_hide_methods(precision: str, tmp_path: Path) -> None:
    case = Case(precision=precision, dynmo={"interval": 0, "schedule": "zero_bubble", "profile": {"batches": 1}})
    still, moved = run_each(2, train, (case, str(tmp_path), False), (case, str(tmp_path), True))
    check_moves_changed_nothing(still, moved)
