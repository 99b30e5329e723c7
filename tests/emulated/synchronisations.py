"""Count how often the host waits for the device, and where; functions that take a case run on a rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import deepspeed
import torch

from tests.emulated import torch_device
from tests.support.configs import Case, config
from tests.support.models import module_of
from tests.support.training import batches, build

TORCH = os.path.dirname(torch.__file__)
BATCHES = 4

Waits = Counter[str]  # by the file that waits, the innermost outside torch


@contextmanager
def counted(waits: Waits) -> Iterator[None]:
    """Count in ``waits`` how often the host waits inside."""
    library = torch_device.library
    library.clear_syncs()
    library.trace_syncs(True)
    yield
    library.trace_syncs(False)
    for text, times in library.syncs().items():
        files = (frame.strip().rpartition(":")[0] for frame in text.splitlines()[1:])
        waits[next(file for file in files if not file.startswith(TORCH))] += times


def waits_of(engine: Any) -> Waits:
    """Count in batches of the steady state."""
    data, waits = batches(engine), Waits()
    for _ in range(BATCHES):
        engine.train_batch(data)
    with counted(waits):
        for _ in range(BATCHES):
            engine.train_batch(data)
    return waits


def waits_under(case: Case, blocks: Sequence[dict[str, Any]]) -> tuple[Waits, ...]:
    """Count under stock DeepSpeed, and under ds_dynmo with each of ``blocks``."""
    stock = replace(case, dynmo=None)
    module = module_of(stock)
    parameters = list(module.parameters())
    engine = deepspeed.initialize(model=module, model_parameters=parameters, config=config(stock))[0]
    return (waits_of(engine), *(waits_of(build(replace(case, dynmo=block))) for block in blocks))


def waits_for_magnitudes(case: Case) -> Waits:
    """Count where a callback measures gradients in each step."""
    engine = build(case)
    engine.before_step(lambda: engine.gradient_magnitudes())
    return waits_of(engine)


def by_ds_dynmo(waits: Waits) -> list[str]:
    """List the files of ds_dynmo that wait, each as often as it does."""
    return [os.path.basename(file) for file in waits.elements() if "/ds_dynmo/" in file]
