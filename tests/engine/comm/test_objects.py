"""Objects sent between ranks: on the CPU while they travel, on the receiver's device when they arrive."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from ds_dynmo.engine.comm.objects import from_bytes, to_bytes
from tests.support.stand_in import Accelerated

CPU = torch.device("cpu")


def test_tensors_on_an_accelerator_travel_on_the_cpu() -> None:
    step, rate = Accelerated(torch.tensor(7.0)), Accelerated(torch.tensor(0.1))
    assert step.device.type != "cpu"
    with pytest.raises(AssertionError, match="a context"):
        pickle.dumps({"step": step})
    sent = to_bytes({"scalars": {0: {"step": step}}, "options": [{"lr": rate}], "held": torch.arange(3)})
    found = from_bytes(sent, CPU)
    tensors = [found["scalars"][0]["step"], found["options"][0]["lr"], found["held"]]
    assert [type(tensor) for tensor in tensors] == [torch.Tensor] * 3
    assert [tensor.tolist() for tensor in tensors] == [7.0, pytest.approx(0.1), [0, 1, 2]]


def test_tensors_arrive_on_the_receivers_device() -> None:
    sent = to_bytes([Accelerated(torch.tensor(7.0)), torch.tensor(8.0)])
    there = from_bytes(sent, torch.device("meta"))  # a second device that every machine has
    assert [tensor.device.type for tensor in there] == ["meta", "cpu"]


def test_shared_objects_stay_shared() -> None:
    step, parameter = Accelerated(torch.tensor(7.0)), nn.Parameter(torch.ones(2))
    first, second, weight, cpu = from_bytes(to_bytes([step, step, parameter, torch.ones(1, requires_grad=True)]), CPU)
    assert first is second and not first.requires_grad
    assert isinstance(weight, nn.Parameter) and weight.tolist() == [1, 1] and cpu.requires_grad


def test_a_tensor_without_data_is_refused() -> None:
    with pytest.raises(TypeError, match=r"shape \[2, 3\] is on the device meta"):
        to_bytes({"state": [torch.empty(2, 3, device="meta")]})


@pytest.mark.parametrize("value", [None, 3, "text", b"bytes", {"a": (1, 2.5)}, ["list"], {1, 2}])
def test_other_values_arrive_unchanged(value: Any) -> None:
    assert from_bytes(to_bytes(value), CPU) == value


def test_an_unpicklable_object_is_refused() -> None:
    with pytest.raises((pickle.PicklingError, TypeError, AttributeError)):
        to_bytes(lambda: None)
