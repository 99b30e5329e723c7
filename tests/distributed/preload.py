"""What the fork server does once, so that no rank has to: imports, and what it changes in DeepSpeed."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.runtime.bf16_optimizer

from ds_dynmo import skip_shm_operator

MODULES = [
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "ds_dynmo.engine.initialization",
    "ds_dynmo.models",
    "pytest",  # what each test's file imports, where the functions that ranks run stand
    "tests.distributed.support.case_runs",
    "tests.distributed.support.checkpoints",
    "tests.distributed.support.elastic",
    "tests.distributed.support.script",
    "tests.distributed.support.told_clock",
]
OPTIONAL = [  # not every version of DeepSpeed has all of these
    "deepspeed.runtime.zero.muon.muon_optimizer",  # what ZeRO imports in its constructor: torch's compiler, seconds
    "deepspeed.module_inject.auto_ep_config",  # what DeepSpeed's engine imports in its own: 0.05 s of each rank
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_repack",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "mixtral", "qwen3")),
]


def _nothing(*_: Any, **__: Any) -> None:
    """Stands in for a message about memory."""


ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # the fork server takes over no path of pytest's
for name in MODULES:
    try:
        importlib.import_module(name)
    except ImportError as error:  # which a fork server passes over in silence: each rank would import all of it
        raise RuntimeError(f"the ranks of tests need {name}") from error
for name in OPTIONAL:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
skip_shm_operator()  # would be compiled: 40 s
deepspeed.runtime.bf16_optimizer.see_memory_usage = _nothing  # collects garbage: seconds per optimizer
gc.collect()
gc.freeze()  # a rank's collections leave what it shares with the server alone, which would copy it page by page
