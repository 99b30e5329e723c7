"""Describe the machine and the libraries of this process."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator


def hardware() -> dict[str, object]:
    """Describe the machine and the libraries of this process."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "accelerator": get_accelerator().device_name(),
        "devices": device_names(),
    }


def device_names() -> list[str]:
    """Name the devices that this process sees, by their model; a CPU has no such names."""
    accelerator = get_accelerator()
    name_of = getattr(torch.get_device_module(accelerator.device_name()), "get_device_name", None)
    return [] if name_of is None else [str(name_of(index)) for index in range(accelerator.device_count())]


def processor() -> str:
    """Name the processor, by its model where the system tells it, which is Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
