"""DeepSpeed's own pipeline engine trains on the emulated device to the bit as on the CPU, and no fault is reported."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

from tests.support.configs import PRECISIONS, Case, client_optimizer, config
from tests.support.harness import run
from tests.support.models import layers, loss
from tests.support.training import micro_batch


def train_all(stages: int, precisions: Collection[str], delay: float) -> list[Any]:
    if get_accelerator().device_name() == "emulated":
        from tests.emulated.torch_device import library

        library.set_delay(delay)
    return [train(Case(stages=stages, precision=precision, dynmo=None)) for precision in precisions]


def train(case: Case) -> tuple[list[float], list[bytes]]:
    torch.manual_seed(0)
    module = PipelineModule(layers=layers(case), num_stages=case.stages, loss_fn=loss, partition_method="uniform")
    parameters = list(module.parameters())
    settings = config(case)
    settings.pop("dynmo", None)
    optimizer = client_optimizer(case, parameters)
    engine = deepspeed.initialize(model=module, model_parameters=parameters, optimizer=optimizer, config=settings)[0]
    data = (micro_batch(number, 0) for number in itertools.count())
    losses = [engine.train_batch(data).item() for _ in range(3)]
    return losses, [parameter.detach().cpu().float().numpy().tobytes() for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("stages", "precisions"),
    [
        (2, ["bf16", "bf16 zero1"]),
        (4, ["fp32"]),
        *(pytest.param(stages, [*PRECISIONS], marks=pytest.mark.nightly) for stages in (2, 4)),
    ],
)
def test_stock_pipelines_equal_the_cpus(stages: int, precisions: list[str]) -> None:
    """Two stages have two replicas."""
    on_cpu, emulated, delayed = (
        run(4, train_all, stages, precisions, delay, backend=backend)
        for backend, delay in (("gloo", 0), (None, 0), (None, 2))
    )
    assert emulated == on_cpu
    assert delayed == on_cpu
