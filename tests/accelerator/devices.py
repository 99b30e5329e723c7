"""The accelerators of this machine, what they can, and ranks that have one each.

These tests are skipped on a machine without accelerators, and in a run of other tests, which uses the CPU. On a machine
with accelerators run ``scripts/test.sh --accelerator``; anywhere, ``DS_ACCELERATOR=emulated scripts/test.sh``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests import emulated
from tests.support.configs import PRECISIONS
from tests.support.harness import run

ACCELERATOR = get_accelerator()
PRESENT = 0 if ACCELERATOR.device_name() == "cpu" else ACCELERATOR.device_count()
IS_REAL = ACCELERATOR.device_name() != emulated.NAME  # its kernels take their own time, in torch's profiler, too
BUSY_WIDTH = 4096 if IS_REAL else 64  # of matrices whose products keep the device busy for long
SECONDS = 900.0  # every rank imports everything, and compiles


def needs(count: int) -> Any:
    """Skip a test on a machine that has fewer accelerators."""
    return pytest.mark.skipif(count > PRESENT, reason=f"needs {count} accelerator(s), DeepSpeed uses {PRESENT} here")


def variants(name: str, values: Iterable[Any], quick: Collection[Any]) -> Any:
    """Give a test an argument's ``values``; the short form on the emulated device has the ``quick`` ones alone."""
    marks = {value: () if IS_REAL or value in quick else (pytest.mark.nightly,) for value in values}
    return pytest.mark.parametrize(name, [pytest.param(value, marks=marks[value]) for value in marks])


all_precisions = variants("precision", PRECISIONS, ("fp32", "bf16 zero1"))


def only_real(what: str) -> Any:
    """Skip a test on the emulated device, which does not show ``what``."""
    return pytest.mark.skipif(not IS_REAL, reason=f"only a real device shows {what}")


def run_on_devices(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on ranks with an accelerator each, and return the results in rank order."""
    return run(num_ranks, repeatably, function, args, seconds=SECONDS)


def repeatably(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call ``function`` with deterministic algorithms, where there are any."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    return function(*args)


def each(function: Callable[..., Any], calls: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Call ``function(*call)`` for each of ``calls``, in turn, in one process."""
    return [function(*call) for call in calls]


def device_seconds(call: Callable[[], Any]) -> float:
    """Return the seconds that the device computes for ``call``: the kernels' own time, by torch's profiler."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        call()
        ACCELERATOR.synchronize()
    on_device = [event for event in profile.events() if event.device_type != torch.autograd.DeviceType.CPU]
    return float(sum(event.time_range.elapsed_us() for event in on_device)) / 1e6
