"""What the device finds in a rank fails its test, with the stacks of both sides; ranks can be forked to the CPU too."""

from __future__ import annotations

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests.support.harness import RankError, run


def read_too_early() -> None:
    device = get_accelerator().current_device_name()
    written = torch.ones(4, device=device)
    with get_accelerator().stream(get_accelerator().Stream()):
        written.add(1)  # on a stream that does not wait for the one that wrote


def test_a_fault_fails_the_test_with_both_stacks() -> None:
    """Of the rank that found it first."""
    with pytest.raises(RankError, match=r"^rank [01] failed:\nthe emulated device, 1 times: ") as raised:
        run(2, read_too_early)
    race = str(raised.value).partition("1 times: race: ")[2]
    earlier, now = race.partition("failed after it")[0].split("  now, on stream")
    assert "read_too_early" in earlier and "read_too_early" in now


def device_of_rank() -> tuple[str, str]:
    return get_accelerator().device_name(), torch.distributed.get_backend()


def test_ranks_are_on_the_device_or_on_the_cpu() -> None:
    assert set(run(2, device_of_rank)) == {("emulated", "emulated_nccl")}
    assert set(run(2, device_of_rank, backend="gloo")) == {("cpu", "gloo")}
