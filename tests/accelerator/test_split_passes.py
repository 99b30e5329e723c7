"""A backward pass in two parts gives the bits of one pass, with a device's own products."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator.devices import ACCELERATOR, needs, run_on_devices
from tests.support.split_models import MODELS, mixtral, seeded
from tests.support.split_passes import WIDTH, check_same, inputs


def deferred_on(device: str, dtype: torch.dtype) -> dict[str, set[str]]:
    """Compare both passes of every model, and name the weights that were deferred."""
    passes = [(given.to(device), gradient.to(device)) for given, gradient in inputs(2, 8, WIDTH, dtype=dtype)]
    found = {}
    for name, (make, _) in MODELS.items():
        model, other = (seeded(make).to(device, dtype) for _ in range(2))
        found[name] = check_same(model, passes, other=other)
    found["mixtral"] = check_same(mixtral("grouped_mm").to(device, dtype), passes)
    return found


@needs(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_those_of_one_pass(dtype: torch.dtype) -> None:
    expected = {name: deferred for name, (_, deferred) in MODELS.items()}
    expected["mixtral"] = {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
    assert run_on_devices(1, deferred_on, ACCELERATOR.current_device_name(), dtype) == [expected]
