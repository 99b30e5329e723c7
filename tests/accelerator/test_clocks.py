"""The engine's clock on an accelerator, compared with the device's own profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_dynmo
from ds_dynmo.engine.measure.profiler import EventClock
from tests.accelerator.devices import ACCELERATOR, device_seconds, needs, only_real, run_on_devices
from tests.support.configs import Case, config

WIDTH = 2048
COUNTS = [2, 8, 4]  # matrix products of each layer


class Products(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            hidden = hidden @ self.weight
        return hidden


def clocked() -> tuple[list[float], list[float]]:
    """Return each layer's seconds, by events and by the device's profiler, one layer after the other."""
    clock, device = EventClock(ACCELERATOR), ACCELERATOR.current_device_name()
    layers, hidden = [Products(count).to(device) for count in COUNTS], torch.ones(WIDTH, WIDTH, device=device)
    expected = [device_seconds(lambda layer=layer: layer(hidden)) for layer in layers]  # warms up, too
    times = [clock.now()]
    for layer in layers:
        layer(hidden)
        times.append(clock.now())
    return clock.seconds_between(times), expected


def profiled() -> tuple[list[float], list[float]]:
    """Return each layer's forward seconds, in the engine's profile and by the device's profiler."""
    torch.manual_seed(0)
    module = PipelineModule(
        layers=[LayerSpec(Products, count) for count in COUNTS],
        num_stages=1,
        loss_fn=lambda output, label: (output - label).square().mean(),
    )
    block = {"interval": 1, "profile": {"batches": 3}}
    engine = ds_dynmo.initialize(
        model=module, model_parameters=list(module.parameters()), config=config(Case(dynmo=block))
    )[0]
    batch = torch.ones(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)
    data: Any = iter(lambda: batch, None)
    while engine.profile is None:
        engine.train_batch(data)
    hidden = batch[0].to(engine.device)
    expected = [device_seconds(lambda layer=layer: layer(hidden)) for layer in engine.module.forward_funcs]
    return [layer.forward_seconds for layer in engine.profile.layers], expected


@needs(1)
@only_real("the seconds of its kernels")
@pytest.mark.parametrize("measure", [clocked, profiled])
def test_events_agree_with_the_devices_profiler(measure: Any) -> None:
    ((measured, expected),) = run_on_devices(1, measure)
    assert measured == pytest.approx(expected, rel=0.2)
    assert measured[1] == pytest.approx(4 * measured[0], rel=0.2)
