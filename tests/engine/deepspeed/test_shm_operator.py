"""What ``initialize`` warns of, once, on rank 0: DeepSpeed's shared-memory operator, and versions newer than tested."""

from __future__ import annotations

import deepspeed
import pytest
import torch
from deepspeed.comm import comm
from deepspeed.utils import logger

from tests.support.configs import Case
from tests.support.harness import run_each
from tests.support.training import Warnings, build

pytestmark = pytest.mark.ranks


def warnings(loaded: bool, engines: int) -> tuple[bool, list[str]]:
    """Build engines with the operator ``loaded`` or not. Return whether it was loaded before, and warnings."""
    is_there = comm.cdb.shm_comm_op is not None
    if loaded:
        comm.cdb.shm_comm_op = object()  # stands for the real one, which takes 40 s to compile and is not called
        torch.__version__ = "99.0"
    warned = Warnings(logger)
    for _ in range(engines):
        build(Case(stages=deepspeed.comm.get_world_size()))
    return is_there, [message for message in warned.messages if "deepspeed_shm_comm" in message or "newer" in message]


def test_a_program_that_loaded_it_with_an_untested_torch_is_warned_once_on_rank_0() -> None:
    without, ((_, first), (_, second)) = run_each(2, warnings, (False, 1), (True, 2))
    for is_there, found in without:
        assert not is_there and not any("deepspeed_shm_comm" in message for message in found)
    assert len(first) == 2 and not second
    assert "torch 99.0 (tested: 2.13.0, 2.15.0)" in first[1]
    assert "/dev/shm" in first[0] and "ds_dynmo.skip_shm_operator() before deepspeed.init_distributed()" in first[0]
