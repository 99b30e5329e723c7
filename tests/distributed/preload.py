"""What the fork server does once, so that no rank has to: imports, and DeepSpeed's probe of what it could compile."""

from __future__ import annotations

import contextlib
import gc
import importlib
from typing import Any

import deepspeed
import deepspeed.runtime.bf16_optimizer

MODULES = [
    "torch._dynamo",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # what ZeRO imports in its constructor: torch's compiler, seconds
    "deepspeed.module_inject.auto_ep_config",  # what DeepSpeed's engine imports in its own: 0.05 s of each rank
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_repack",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "ds_dynmo.engine",
    "ds_dynmo.models",
    "tests.distributed.workloads",
    "tests.distributed.case_workloads",
]
OPTIONAL = [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "mixtral", "qwen3")]


def _nothing(*_: Any, **__: Any) -> None:
    """Stands in for a message about memory."""


for name in MODULES:
    importlib.import_module(name)
for name in OPTIONAL:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled: 40 s
deepspeed.runtime.bf16_optimizer.see_memory_usage = _nothing  # collects garbage: seconds per optimizer
gc.collect()
gc.freeze()  # a rank's collections leave what it shares with the server alone, which would copy it page by page
