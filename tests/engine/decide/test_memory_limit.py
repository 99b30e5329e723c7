"""The memory limit of a rank, where it is a share of the accelerator's memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_dynmo.engine.decide import memory


class Worlds:
    """Ranks of which another one has half of this one's memory."""

    def __init__(self) -> None:
        self.worlds_left, self.agreements = 0, 0

    def max_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        self.agreements += 1
        return torch.maximum(numbers, numbers / 2)


def limit_on(
    monkeypatch: pytest.MonkeyPatch, device: str, configured: float | None
) -> tuple[memory.MemoryLimit, Worlds]:
    """Return the limit of ranks on such devices, of 500 and 1000 bytes."""
    accelerator = SimpleNamespace(total_memory=lambda: 1000, device_name=lambda: device)
    monkeypatch.setattr(memory, "get_accelerator", lambda: accelerator)
    comm = Worlds()
    stage: Any = SimpleNamespace(config=SimpleNamespace(memory_limit=configured), comm=comm)
    return memory.MemoryLimit(stage), comm


def test_ranks_agree_once_in_a_world_on_the_least_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, comm = limit_on(monkeypatch, "cuda", 0.5)
    assert [limit.bytes(), limit.bytes()] == [250, 250] and comm.agreements == 1
    comm.worlds_left += 1
    assert limit.bytes() == 250 and comm.agreements == 2


@pytest.mark.parametrize(("device", "in_batch"), [("cuda", 450), ("cpu", None)])
def test_without_a_limit_an_accelerator_has_one_for_moves_during_batches(
    monkeypatch: pytest.MonkeyPatch, device: str, in_batch: int | None
) -> None:
    limit, _ = limit_on(monkeypatch, device, None)
    assert (limit.bytes(), limit.bytes(in_batch=True)) == (None, in_batch)
