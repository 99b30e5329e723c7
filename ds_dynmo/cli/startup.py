"""Start the ranks of commands."""

from __future__ import annotations

import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import ds_dynmo
from ds_dynmo.errors import ConfigError


def take_device(local_rank: int) -> None:
    """Use the accelerator that has the rank's number on its host; on a CPU, hide all others from this process.

    Raises:
        ConfigError: this process sees no such accelerator.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed's launcher has put the ranks' numbers there
    elif local_rank >= accelerator.device_count():
        raise ConfigError(
            f"LOCAL_RANK = {local_rank}: this process sees {accelerator.device_count()} accelerators. Each rank takes "
            "that with its number, so give all of a host's to each of its ranks"
        )
    accelerator.set_device(local_rank)


def init_distributed() -> None:
    """Call ``deepspeed.init_distributed``, in a process that leaves nothing behind when it ends or is killed.

    Raises:
        ConfigError: the ranks cannot meet; on rank 0, another program has the port.
    """
    ds_dynmo.end_with_launcher()
    ds_dynmo.skip_shm_operator()
    try:
        deepspeed.init_distributed()
    except torch.distributed.DistNetworkError as error:
        address, port = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"MASTER_ADDR = {address}, MASTER_PORT = {port}: ranks cannot meet there: {reason}"
        ) from error


def begin_rank() -> None:
    """Start a rank of a benchmark. It computes with one thread unless OMP_NUM_THREADS says otherwise.

    Raises:
        ConfigError: it has no device, or the ranks cannot meet.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    take_device(int(os.environ["LOCAL_RANK"]))
    init_distributed()
