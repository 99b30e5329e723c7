"""Layers that tell how long they take, and a clock that they advance."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_dynmo
from ds_dynmo.engine.measure.profiler import CpuClock
from tests.support.configs import Case, config


class ToldClock(CpuClock):
    """A clock that only layers advance, so that nothing else on the machine is measured."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


clock = ToldClock()


class UnsteadyLayer(nn.Module):
    """Takes its cost times the slowdown of its rank, with jitter of up to a share of it in each batch."""

    def __init__(self, number: int, seconds: tuple[float, float], slowdowns: Sequence[float], jitter: float) -> None:
        super().__init__()
        self.number, self.slowdowns, self.jitter = number, tuple(slowdowns), jitter
        self.forward_seconds, self.backward_seconds = seconds
        self.batch = 0
        self.weight = nn.Parameter(torch.ones(4))

    def sleep(self, seconds: float) -> None:
        off = random.Random(1000 * self.batch + self.number).uniform(1 - self.jitter, 1 + self.jitter)
        clock.sleep(seconds * off * self.slowdowns[torch.distributed.get_rank()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(hidden * self.weight, self)  # type: ignore[no-any-return]


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: UnsteadyLayer) -> torch.Tensor:
        ctx.layer = layer
        layer.sleep(layer.forward_seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.layer.sleep(ctx.layer.backward_seconds)
        return gradient, None


def unsteady_engine(
    block: dict[str, Any], seconds: Sequence[tuple[float, float]], slowdowns: Sequence[float], jitter: float
) -> tuple[Any, Iterator[Any]]:
    module = PipelineModule(
        layers=[LayerSpec(UnsteadyLayer, number, own, slowdowns, jitter) for number, own in enumerate(seconds)],
        num_stages=len(slowdowns),
        loss_fn=lambda output, label: (output - label).square().mean(),
        partition_method="uniform",
    )
    settings = {**config(Case(micro_batches=4)), "dynmo": block}
    engine = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    engine.profiler.clock = clock

    def data() -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(0)
        while True:
            yield torch.rand(2, 4, generator=numbers), torch.zeros(2, 4)

    return engine, data()
