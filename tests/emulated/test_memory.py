"""A move during a batch has to fit an accelerator; where it does not, training waits for the move."""

from __future__ import annotations

import pytest

from ds_dynmo.engine.decide import memory
from tests.distributed.harness import run
from tests.distributed.support.configs import Case
from tests.distributed.support.training import batches, build


def moved(share: float) -> tuple[list[int], bool]:
    """Move during a batch that may take ``share`` of the device. Return the partition, and whether it was during it."""
    memory.SHARE_IN_BATCH = share
    engine = build(Case(stages=2, start=(0, 4, 8)))
    data = batches(engine)
    engine.train_batch(data)
    engine.rebalance([0, 2, 8], background=True)
    engine.train_batch(data)
    return engine.partition, engine.reports[-1].background_seconds is not None


@pytest.mark.parametrize(("share", "in_batch"), [(memory.SHARE_IN_BATCH, True), (1e-9, False)])
def test_without_a_memory_limit_a_move_during_a_batch_fits_the_device(share: float, in_batch: bool) -> None:
    assert run(2, moved, share) == [([0, 2, 8], in_batch)] * 2
