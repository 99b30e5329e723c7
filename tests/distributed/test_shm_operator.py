"""DeepSpeed's operator for shared memory: done without, and warned of where a user's program has it."""

from __future__ import annotations

from tests.distributed import shm_operator_workloads as work
from tests.distributed.harness import run


def test_who_has_it_is_warned_once_on_rank_0() -> None:
    (_, first), (_, second) = run(2, work.warnings, True, 2)
    assert len(first) == 1 and not second
    assert "/dev/shm" in first[0] and "ds_dynmo.skip_shm_operator() before deepspeed.init_distributed()" in first[0]


def test_who_does_without_is_not() -> None:
    assert run(2, work.warnings, False, 1) == [(False, [])] * 2
