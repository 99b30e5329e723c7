"""A run that shares a large state, and what its ranks gather of each other meanwhile; every function runs on a rank."""

from __future__ import annotations

import pickle
from typing import Any

import torch.distributed as dist

from ds_dynmo.errors import MigrationError
from tests.distributed.workloads import Case, batches, build

STATE_BYTES = 1_000_000


class Large:
    """A shared state: rank 0's is the one that counts."""

    def __init__(self, rank: int) -> None:
        self.content = bytes([rank]) * STATE_BYTES

    def state_dict(self) -> dict[str, bytes]:
        return {"content": self.content}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        self.content = state["content"]


def repack(case: Case, sizes: list[int]) -> tuple[int, bool]:
    """Bytes of the largest value that was gathered from all ranks, and whether this rank has rank 0's state."""
    engine = build(case)
    state, data = Large(engine.global_rank), batches(engine)
    engine.share_state("large", state)
    engine.train_batch(data)
    gathered, all_gather = [0], dist.all_gather_object

    def counting(every: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        gathered.append(len(pickle.dumps(value)))
        all_gather(every, value, *args, **kwargs)

    dist.all_gather_object = counting
    for number in sizes:
        if not engine.released:
            engine.repack(number)
        elif not engine.wait_for_recall():
            break
    dist.all_gather_object = all_gather
    engine.dismiss_parked()
    return max(gathered), state.content == Large(0).content


def shared_on_rank_0_alone(case: Case) -> tuple[str, bool, float]:
    """What a re-packing says, whether that is harmless, and the loss of a batch after it."""
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    if engine.global_rank == 0:
        engine.share_state("large", Large(0))
    try:
        engine.repack(2)
    except MigrationError as error:
        return str(error), error.harmless, engine.train_batch(data).item()
    return "nothing was raised", False, 0.0
