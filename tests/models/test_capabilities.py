"""Probes try something on a device, and depend on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_dynmo.models.capabilities import can_compute


def fails() -> None:
    raise NotImplementedError("no kernel")


def test_an_attempt_that_fails_is_no() -> None:
    assert can_compute(lambda: torch.ones(2) + 1)
    assert not can_compute(fails)


@pytest.mark.parametrize("error", [MemoryError, OSError, torch.OutOfMemoryError])
def test_a_machine_without_room_is_no_answer(error: type[Exception]) -> None:
    def has_no_room() -> None:
        raise error("no room")

    with pytest.raises(error, match="no room"):
        can_compute(has_no_room)


def test_no_mode_of_the_caller_holds_in_an_attempt() -> None:
    """Activation checkpointing counts what a pass saves: a probe in the first pass must not add to it."""
    saved, found = [], []

    def attempt() -> None:
        weight = torch.ones(2, 2, requires_grad=True)
        made = (weight @ weight).exp()
        found.append((made.dtype, torch.autograd.grad(made.sum(), weight)[0].shape))

    def save(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), hooks:
        assert can_compute(attempt)
    assert found == [(torch.float32, (2, 2))] and not saved
