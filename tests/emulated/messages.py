"""What ranks do in tests of their messages on the emulated device; every function runs on a rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.distributed.support.configs import Case
from tests.distributed.support.training import batches, build


def losses_of_batches() -> list[float]:
    """Train, and read the losses only after all batches."""
    engine = build(Case(dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}}))  # which posts them
    data = batches(engine)
    return [loss.item() for loss in [engine.train_batch(data) for _ in range(3)]]


class Untold:
    """A handle of torch's that never says by itself that it is done."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return False

    def wait(self, *timeout: Any) -> Any:
        return self._work.wait(*timeout)


def poll_before_and_after_a_wait() -> tuple[bool, list[float]]:
    """Exchange numbers with the other rank. Return whether a poll found them once the host had waited, and them."""
    engine = build(Case())
    mine, theirs = (torch.full((2,), number, device=engine.device) for number in (float(dist.get_rank()), 7.0))
    other = 1 - dist.get_rank()
    pending = engine.stage.comm.p2p.post([(other, mine)], [(other, theirs)])
    pending._works = [Untold(work) for work in pending._works]
    pending.is_done()
    get_accelerator().synchronize()
    is_done = pending.is_done()
    pending.wait()
    return is_done, theirs.tolist()
