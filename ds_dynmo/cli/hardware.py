"""What this process runs on, and with."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import deepspeed
import torch


def hardware() -> dict[str, object]:
    """Describe what this process runs on, and with."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
    }


def processor() -> str:
    """Name the processor, by its model where the system tells it, which is Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
