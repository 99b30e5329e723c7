"""Import and patch once, in the fork server, what every rank needs."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.runtime.bf16_optimizer
import torch

from ds_dynmo import skip_shm_operator
from ds_dynmo.engine.initialization import check_packages

MODULES = [
    "torch._dynamo",
    "torch.utils.serialization.config",
    "ds_dynmo.engine.initialization",
    "ds_dynmo.models",
    "pytest",  # imported by the files of tests, which hold the functions that ranks run
    "tests.support.case_runs",
    "tests.support.checkpoints",
    "tests.support.elastic",
    "tests.support.script",
    "tests.support.told_clock",
]
OPTIONAL = [  # not every environment, version of torch or of DeepSpeed has all of these
    "datasets",  # 1 s per rank that reads rows
    "torch.profiler._cupti_monitor",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imported by ZeRO's constructor, with torch's compiler: seconds
    "deepspeed.module_inject.auto_ep_config",  # imported by the constructor of DeepSpeed's engine: 0.05 s per rank
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_repack",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "mixtral", "qwen3")),
]


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces a message about memory."""


ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # the fork server does not inherit pytest's path
for name in MODULES:
    try:
        importlib.import_module(name)
    except ImportError as error:  # the fork server would ignore it silently, and each rank would import everything
        raise RuntimeError(f"the ranks of tests need {name}") from error
for name in OPTIONAL:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
check_packages()  # for all ranks
torch.manual_seed(torch.initial_seed())  # imports a part of torch's compiler
skip_shm_operator()  # compiling it takes 40 s
deepspeed.runtime.bf16_optimizer.see_memory_usage = _nothing  # it collects garbage, which takes seconds per optimizer
gc.collect()
gc.freeze()  # otherwise garbage collection in a rank would copy the pages that it shares with the server
