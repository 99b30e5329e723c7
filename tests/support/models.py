"""Small models that the distributed tests train."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from tests.support.configs import Case

WIDTH = 8
VOCABULARY = 11
SEQUENCE = 4


def seeded(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * 0.3


class Embedding(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((VOCABULARY, WIDTH), seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


def project(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden, embedding.weight)


class Block(nn.Module):
    """A residual layer whose inner width depends on its number, so that layers differ in size."""

    def __init__(self, index: int) -> None:
        super().__init__()
        inner = 4 + 3 * (index % 4)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        for offset, parameter in enumerate((self.up.weight, self.up.bias, self.down.weight, self.down.bias)):
            parameter.data.copy_(seeded(parameter.shape, 100 * index + offset))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Head(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((VOCABULARY, WIDTH), seed))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.t()


def scale(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 1.25


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def layers(case: Case) -> list[Any]:
    ends: list[Any]
    if case.tied:
        ends = [
            TiedLayerSpec("embedding", Embedding, 1, tied_weight_attr="weight"),
            TiedLayerSpec("embedding", Embedding, 1, forward_fn=project, tied_weight_attr="weight"),
        ]
    else:
        ends = [LayerSpec(Embedding, 1), LayerSpec(Head, 2)]
    middle = LayerSpec(nn.Dropout, 0.2) if case.dropout else scale
    return [ends[0], *[LayerSpec(Block, index) for index in range(case.blocks)], middle, ends[1]]


def module_of(case: Case, make_layers: Callable[[Case], list[Any]] = layers, **options: Any) -> PipelineModule:
    """Build the ``PipelineModule`` of ``case``; ``options`` of its constructor take precedence."""
    torch.manual_seed(0)
    arguments = {
        "layers": make_layers(case),
        "num_stages": case.stages,
        "topology": case.topology,
        "loss_fn": loss,
        "partition_method": "uniform",
        "activation_checkpoint_interval": case.checkpoint_interval,
    }
    return PipelineModule(**{**arguments, **options})


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


class SleepingLayer(nn.Module):
    """Sleeps instead of computing, and twice as long in a backward pass, if one is needed."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(hidden * self.weight, self.seconds)  # type: ignore[no-any-return]

    def load_signal(self) -> float:
        return 0.5


class Widen(nn.Module):
    """Returns a tuple of tensors of its own width."""

    def __init__(self, width: int, wider: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((width, wider), seed))

    def forward(self, inputs: Any) -> Any:
        hidden, kept = inputs if isinstance(inputs, tuple) else (inputs, inputs.mean(-1))
        return hidden @ self.weight, kept * 2.0


class Close(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((width, VOCABULARY), 9))

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden, kept = inputs
        return hidden @ self.weight * (1.0 + kept[..., None])  # so that both tensors have gradients


def layers_of_many_widths(case: Case) -> list[Any]:
    widths = [WIDTH, 3, 12, 5, 7]
    wideners = [LayerSpec(Widen, a, b, a) for a, b in zip(widths, widths[1:])]
    return [LayerSpec(Embedding, 1), *wideners, LayerSpec(Close, widths[-1])]


def layers_tied_in_the_middle(case: Case) -> list[Any]:
    def shared() -> Any:
        return TiedLayerSpec(
            "shared",
            Block,
            7,
            tied_weight_attr=["up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias"],
        )

    return [LayerSpec(Embedding, 1), LayerSpec(Block, 1), shared(), LayerSpec(Block, 2), shared(), LayerSpec(Head, 2)]


class FrozenBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.requires_grad_(False)


class Changing(nn.Module):
    """Counts its batches, holds a mask in a buffer and one in an attribute, and can be pruned and frozen."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((WIDTH, 6), index))
        self.back = nn.Parameter(seeded((6, WIDTH), index + 50))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("total", torch.zeros(1))
        self.calls = 0
        self.history: list[Any] = []
        self.mask: torch.Tensor | None = None
        self.rate = 0.5
        self.function = lambda x: torch.tanh(x)  # cannot be pickled

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        self.total += hidden.detach().abs().mean()
        self.history = [*self.history, (self.calls, "x")][-3:]
        inner = self.function(hidden @ self.weight)
        if self.mask is not None:
            inner = inner * self.mask
        if "gain" in self._parameters:
            inner = inner * self.gain
        scale = 1 + 0.01 * (self.seen + self.total + self.calls + len(self.history))
        return hidden + self.rate * scale * (inner @ self.back)


def changing_layers(case: Case) -> list[Any]:
    return [
        LayerSpec(Embedding, 1),
        *[LayerSpec(Changing, i) for i in range(5)],
        nn.LayerNorm(WIDTH),
        LayerSpec(Head, 2),
    ]


class MaskingEmbedding(Embedding):
    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(tokens), tokens > VOCABULARY // 3


class MaskedBlock(Block):
    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden, mask = inputs
        assert mask.dtype == torch.bool
        return torch.where(mask.unsqueeze(-1), super().forward(hidden), hidden), mask


class UnmaskingHead(Head):
    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(inputs[0])


def mask_layers(case: Case) -> list[Any]:
    return [
        LayerSpec(MaskingEmbedding, 1),
        *(LayerSpec(MaskedBlock, index) for index in range(case.num_layers - 2)),
        LayerSpec(UnmaskingHead, 2),
    ]


class Twofold(nn.Module):
    """Returns two tensors, which depend on each other's layers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.one, self.other = Block(index), Block(index + 50)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.one(both[0] + 0.1 * both[1])
        return hidden, self.other(both[1] + 0.1 * hidden)


def in_two(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden, 0.5 * hidden


def add_up(both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return both[0] + both[1]


def twofold(case: Case) -> list[Any]:
    middle = [LayerSpec(Twofold, index) for index in range(case.blocks)]
    return [LayerSpec(Embedding, 1), in_two, *middle, add_up, LayerSpec(Head, 2)]
