"""DeepSpeed's operator for shared memory: done without, and warned of where a user's program has it."""

from __future__ import annotations

import deepspeed
from deepspeed.comm import comm
from deepspeed.utils import logger

from tests.distributed.harness import run
from tests.distributed.support.configs import Case
from tests.distributed.support.training import Warnings, build


def warnings(loaded: bool, engines: int) -> tuple[bool, list[str]]:
    """Was the operator loaded, and what is said of it when engines are made; ``loaded``: by a program of a user's."""
    is_there = comm.cdb.shm_comm_op is not None
    if loaded:
        comm.cdb.shm_comm_op = object()  # compiling the real one takes 40 s: nothing of it is called
    warned = Warnings(logger)
    for _ in range(engines):
        build(Case(stages=deepspeed.comm.get_world_size()))
    return is_there, [message for message in warned.messages if "deepspeed_shm_comm" in message]


def test_who_has_it_is_warned_once_on_rank_0() -> None:
    (_, first), (_, second) = run(2, warnings, True, 2)
    assert len(first) == 1 and not second
    assert "/dev/shm" in first[0] and "ds_dynmo.skip_shm_operator() before deepspeed.init_distributed()" in first[0]


def test_who_does_without_is_not() -> None:
    assert run(2, warnings, False, 1) == [(False, [])] * 2
