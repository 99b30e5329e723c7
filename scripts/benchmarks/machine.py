"""The machine of a benchmark, and the share of its cores that its host gave to others."""

from __future__ import annotations

import os
import time

import psutil  # comes with DeepSpeed
import torch

from ds_dynmo.cli.hardware import hardware


class Machine:
    """The machine, observed from the creation of this object on."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), _stolen_seconds()

    def stolen(self) -> float:
        """Return the share of a virtual machine's cores that its host gave to others; 0 where it does not say."""
        began, stolen = self._began
        passed = (time.perf_counter() - began) * (os.cpu_count() or 1)
        return (_stolen_seconds() - stolen) / passed if passed else 0.0

    def record(self) -> dict[str, object]:
        """Describe it for a benchmark's JSON."""
        return {
            **hardware(),
            "stages": torch.distributed.get_world_size(),
            "stolen": self.stolen(),
        }

    def __str__(self) -> str:
        return f"The machine's host took {self.stolen():.0%} of its cores so far."


def _stolen_seconds() -> float:
    return float(getattr(psutil.cpu_times(), "steal", 0.0))
