"""Runs for test_decisions.py; every function here runs on a rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_dynmo
from ds_dynmo.engine.profiling.profiler import CpuClock
from ds_dynmo.errors import PartitionError
from tests.distributed.workloads import Case, config


class ToldClock(CpuClock):
    """Goes on by what layers say that they take, and by nothing else: what else the machine does is not measured."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


clock = ToldClock()


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


class UnsteadyLayer(nn.Module):
    """Says that it took its cost, times what its rank is slowed down by, in each batch off by up to a share of it."""

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
    engine._profiler._clock = clock

    def data() -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(0)
        while True:
            yield torch.rand(2, 4, generator=numbers), torch.zeros(2, 4)

    return engine, data()


def train_unsteady(
    block: dict[str, Any],
    milliseconds: Sequence[tuple[float, float]],
    steps: int,
    slowdowns: Sequence[float],
    jitter: float = 0.0,
    folder: str | None = None,
) -> dict[str, Any]:
    seconds = [(forward / 1e3, backward / 1e3) for forward, backward in milliseconds]
    engine, data = unsteady_engine(block, seconds, slowdowns, jitter)
    losses = []
    for step in range(steps):
        for layer in engine.module.forward_funcs:
            layer.batch = step
        losses.append(engine.train_batch(data).item())
    result = {
        "losses": losses,
        "weights": {layer.number: layer.weight.tolist() for layer in engine.module.forward_funcs},
        "partition": engine.partition,
        "reports": engine.reports,
        "speeds": engine._cost_model.history.speeds,
    }
    if folder is not None:
        engine.save_checkpoint(folder)
        again, _ = unsteady_engine(block, seconds, slowdowns, jitter)
        again.load_checkpoint(folder)
        result["loaded"] = (again.partition, again._cost_model.history.speeds)
        result["state"] = (engine._cost_model.state_dict(), again._cost_model.state_dict())
    return result


def decide_by_hand(block: dict[str, Any], slowdowns: Sequence[float], starts: Sequence[list[int]]) -> dict[str, Any]:
    """Where layers go from each of ``starts``, in turn, whatever a move takes."""
    engine, data = unsteady_engine({"interval": 0, **block}, [(0.002, 0.004)] * 15, slowdowns, 0.0)
    went = []
    for start in starts:
        engine.rebalance(start)
        for _ in range(3):  # one to warm up, one to profile what came of the move
            engine.train_batch(data)
        went.append(engine.rebalance().new_partition)
    return {"went": went, "speeds": engine._cost_model.history.speeds}


def skip_a_layer(block: dict[str, Any], skipped: int, steps: int) -> dict[str, Any]:
    """A module that leaves a layer out in the first batches, as stochastic depth may; then ``engine.rebalance()``."""
    engine, data = unsteady_engine(block, [(0.001, 0.002)] * 3 + [(0.005, 0.01)], [1.0] * 2, 0.0)
    module = engine.module

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        leaves_out = engine.global_steps < steps
        for position, layer in enumerate(module.forward_funcs):
            if not (leaves_out and engine._layers.start + position == skipped):
                hidden = layer(hidden)
        return hidden

    module.forward = forward
    engine.set_dataiterator(data)
    warned = []
    engine._reporter.warn = warned.append
    losses = [engine.train_batch(data).item() for _ in range(steps - 1)]
    found = {"losses": losses, "warned": warned, "profile": engine.profile, "partition": engine.partition}
    try:
        engine.rebalance()
    except PartitionError as error:
        found["refused"] = str(error)
    found["steps"] = engine.global_steps
    engine.rebalance()
    return {**found, "partition later": engine.partition}


def decide_first(block: dict[str, Any], call: str) -> dict[str, Any]:
    """``engine.rebalance()`` or ``engine.repack()`` before any batch was trained."""
    milliseconds = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0]
    engine, data = unsteady_engine(block, [(ms / 1e3, 2 * ms / 1e3) for ms in milliseconds], [1.0] * 2, 0.0)
    engine.set_dataiterator(data)
    try:
        returned = getattr(engine, call)()
    except PartitionError as error:
        returned = str(error)
    result = {"returned": returned, "rebalances": list(engine.reports), "repacks": engine.repacks}
    result.update(steps=engine.global_steps, released=engine.released, partition=None, profile=engine.profile)
    if not engine.released:
        result["partition"] = engine.partition
        engine.train_batch(data)
        result["rebalances later"] = engine.reports[len(result["rebalances"]) :]
    return result
