"""Start the ranks of scripts."""

from __future__ import annotations

import os

import deepspeed
import torch

import ds_dynmo


def init_distributed() -> None:
    """Call ``deepspeed.init_distributed``, in a process that leaves nothing behind when it ends or is killed."""
    ds_dynmo.end_with_launcher()
    ds_dynmo.skip_shm_operator()
    deepspeed.init_distributed()


def begin_rank() -> None:
    """Start a rank of a benchmark. It computes with one thread unless OMP_NUM_THREADS says otherwise."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    init_distributed()
