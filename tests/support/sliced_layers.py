"""Tensor-parallel layers: each rank holds a slice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from tests.support.configs import Case
from tests.support.models import WIDTH, Embedding, Head, project, seeded

SLICES: dict[str, Any] = {}  # this rank's group and index, where a layer that arrives finds them


class _Copy(torch.autograd.Function):
    """Computes the identity, and sums gradients over the slices."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    """Sums over the slices, and passes gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Any) -> torch.Tensor:
        hidden = hidden.clone()
        dist.all_reduce(hidden, group=group)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class SlicedBlock(nn.Module):
    """A residual layer whose inner width is split unevenly over the slices. Norm and outer bias are not split."""

    def __init__(self, index: int) -> None:
        super().__init__()
        mine = SLICES["index"]
        inner = 4 + 2 * (index % 3) + mine
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(seeded((inner, WIDTH), 100 * index + 10 * mine))
        self.down = nn.Parameter(seeded((WIDTH, inner), 100 * index + 10 * mine + 1))
        self.bias = nn.Parameter(seeded((WIDTH,), 100 * index + 2))
        self.up.model_parallel = self.down.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.multiply(hidden, self.up)

    def multiply(self, hidden: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(_Copy.apply(self.norm(hidden), SLICES["group"]) @ up.t())
        return hidden + _Reduce.apply(inner @ self.down.t(), SLICES["group"]) + self.bias


def sliced_layers(case: Case, block: type[SlicedBlock] = SlicedBlock) -> list[Any]:
    """Return an embedding, sliced blocks and a head. Collective: it makes the slices' groups."""
    for ranks in case.topology.get_axis_comm_lists("model"):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            SLICES.update(group=group, index=ranks.index(dist.get_rank()))
    ends: list[Any] = [LayerSpec(Embedding, 1), LayerSpec(Head, 2)]
    if case.tied:
        ends = [
            TiedLayerSpec("embedding", Embedding, 1, tied_weight_attr="weight"),
            TiedLayerSpec("embedding", Embedding, 1, forward_fn=project, tied_weight_attr="weight"),
        ]
    return [ends[0], *(LayerSpec(block, index) for index in range(case.blocks)), ends[1]]
