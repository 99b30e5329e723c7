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
        self.worlds, self.agreements = 1, 0

    def max_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        self.agreements += 1
        return torch.maximum(numbers, numbers / 2)


def test_ranks_agree_once_in_a_world_on_the_least_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "get_accelerator", lambda: SimpleNamespace(total_memory=lambda: 1000))
    comm = Worlds()
    stage: Any = SimpleNamespace(config=SimpleNamespace(memory_limit=0.5), comm=comm)
    limit = memory.MemoryLimit(stage)
    assert [limit.bytes(), limit.bytes()] == [250, 250] and comm.agreements == 1
    comm.worlds += 1
    assert limit.bytes() == 250 and comm.agreements == 2
