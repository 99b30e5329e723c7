"""A move during a batch has to fit an accelerator; where it does not, training waits for the move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec

from ds_dynmo.engine.decide import memory
from tests.support.configs import Case
from tests.support.harness import run
from tests.support.models import Block, Embedding, Head
from tests.support.training import batches, build, reports_of


def moved(share: float) -> tuple[list[int], bool]:
    """Move during a batch that may take ``share`` of the device. Return the partition, and whether it was during it."""
    memory.SHARE_IN_BATCH = share
    engine = build(Case(stages=2, start=(0, 4, 8)))
    data = batches(engine)
    engine.train_batch(data)
    engine.rebalance([0, 2, 8], background=True)
    engine.train_batch(data)
    return engine.partition, reports_of(engine)[-1].background_seconds is not None


@pytest.mark.parametrize(("share", "in_batch"), [(memory.SHARE_IN_BATCH, True), (1e-9, False)])
def test_without_a_memory_limit_a_move_during_a_batch_fits_the_device(share: float, in_batch: bool) -> None:
    assert run(2, moved, share) == [([0, 2, 8], in_batch)] * 2


class Growing(Block):
    """Saves more for backward in each micro-batch than in the one before."""

    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            hidden = hidden.sin()
        return super().forward(hidden)


def growing(case: Case) -> list[Any]:
    return [LayerSpec(Embedding, 1), *(LayerSpec(Growing, number) for number in (1, 2)), LayerSpec(Head, 2)]


def activations(migration: str) -> int:
    """Return the bytes that layer 1 saves for backward, by a profile of one batch."""
    block = {"interval": 0, "min_improvement": 0.99, "migration": migration, "profile": {"batches": 1}}
    engine = build(Case(stages=2, micro_batches=4, start=(0, 2, 4), dynmo=block), growing)
    engine.model_changed("to be profiled")
    engine.train_batch(batches(engine))
    return engine.profile.layers[1].activation_bytes


def test_moves_during_batches_are_checked_by_the_largest_micro_batch() -> None:
    """With moves for which training waits there is no limit here, and the first micro-batch is enough."""
    (first, _), (largest, _) = (run(2, activations, kind) for kind in ("blocking", "background"))
    assert largest > first > 0
