"""Shared state is broadcast from one rank: no rank gathers a copy from every rank."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch.distributed as dist

from ds_dynmo.errors import MigrationError
from tests.distributed.harness import run
from tests.distributed.support.configs import Case
from tests.distributed.support.training import batches, build

STATE_BYTES = 1_000_000


class Large:
    """A shared state, of which rank 0's counts."""

    def __init__(self, rank: int) -> None:
        self.content = bytes([rank]) * STATE_BYTES

    def state_dict(self) -> dict[str, bytes]:
        return {"content": self.content}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        self.content = state["content"]


def repack_with_a_large_state(case: Case, sizes: list[int]) -> tuple[int, bool]:
    """Return the bytes of the largest value that was gathered from all ranks, and whether this rank has rank 0's."""
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


@pytest.mark.parametrize("repack", [{"release": "park"}, {"release": "park", "freed_ranks": "replicas"}])
def test_shared_state_is_not_gathered_from_all_ranks(repack: dict[str, Any]) -> None:
    case = Case(stages=4, dynmo={"interval": 0, "timeout_seconds": 60.0, "repack": repack})
    for gathered, is_first in run(4, repack_with_a_large_state, case, [2, 4]):
        assert gathered < STATE_BYTES // 10
        assert is_first


def shared_on_rank_0_alone(case: Case) -> tuple[str, bool, float]:
    """Return the error of a re-packing, whether it is harmless, and the loss of a batch after it."""
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


def test_state_that_only_some_ranks_share_is_refused_before_anything_moves() -> None:
    case = Case(stages=3, dynmo={"interval": 0, "timeout_seconds": 5.0})
    for message, harmless, loss in run(3, shared_on_rank_0_alone, case):
        assert "ranks differ: ['large'] on ranks [0], [] on ranks [1, 2]. No layer has moved" in message
        assert harmless and loss > 0
