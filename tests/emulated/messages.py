"""What ranks do in tests of their messages on the emulated device; every function runs on a rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.support.configs import Case
from tests.support.training import batches, build


def losses_of_batches() -> list[float]:
    """Train, and read the losses only after all batches."""
    engine = build(Case(dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}}))  # which posts them
    data = batches(engine)
    return [loss.item() for loss in [engine.train_batch(data) for _ in range(3)]]


class Untold:
    """A handle of torch's that never says by itself that it is done."""

    is_waited_for = False

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return False

    def wait(self, *timeout: Any) -> Any:
        self.is_waited_for = True
        return self._work.wait(*timeout)


def poll_before_and_after_a_wait() -> tuple[bool, bool, bool, list[float]]:
    """Exchange numbers with the other rank. Return what a poll found, whether it waited, what one found later, them."""
    engine = build(Case())
    mine, theirs = (torch.full((2,), number, device=engine.device) for number in (float(dist.get_rank()), 7.0))
    other = 1 - dist.get_rank()
    pending = engine.stage.comm.p2p.post([(other, mine)], [(other, theirs)])
    handles = pending._works = [Untold(work) for work in pending._works]
    is_done, is_waited_for = pending.is_done(), any(work.is_waited_for for work in handles)
    pending.wait()
    return is_done, is_waited_for, pending.is_done(), theirs.tolist()
