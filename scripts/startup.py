"""How the ranks of every script begin."""

from __future__ import annotations

import deepspeed

import ds_dynmo


def init_distributed() -> None:
    """``deepspeed.init_distributed``, in a process that leaves nothing behind when it ends or is killed."""
    ds_dynmo.end_with_launcher()
    ds_dynmo.skip_shm_operator()
    deepspeed.init_distributed()
