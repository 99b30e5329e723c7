"""DeepSpeed's operator for shared memory on a CPU, ``deepspeed_shm_comm``: skip it, or warn of files it leaves.

DeepSpeed 0.19.8 compiles it in the first job of a user (40 s) and loads it in every later one. It maps 69 MB of
/dev/shm for each rank of a launch and never removes them. A job that is killed while it compiles leaves a lock on which
every later one waits. What it speeds up is ``deepspeed.comm.inference_all_reduce`` alone, which pipelines do not call.
"""

from __future__ import annotations

import importlib
from typing import Any

OPERATOR = "deepspeed_shm_comm"
REMEDY = "call ds_dynmo.skip_shm_operator() before deepspeed.init_distributed()"


def skip_shm_operator() -> None:
    """Keep DeepSpeed from compiling and loading its operator for shared memory in this process.

    Call it before ``deepspeed.init_distributed``. Every all-reduce of a training goes over the backend either way:
    no number changes. On an accelerator DeepSpeed has no such operator.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute deepspeed.comm.torch is torch
    # Not deepspeed.ops.__compatible_ops__: reading it compiles a trial program in a temporary folder (0.3 s).
    backend.build_shm_op = _no_operator


def warn_of_shm_operator() -> None:
    """Warn, once, on rank 0, if the operator is loaded."""
    from deepspeed.comm import comm

    from ds_dynmo.engine.deepspeed.logs import warning_once

    if getattr(comm.cdb, "shm_comm_op", None) is not None and comm.get_rank() == 0:
        warning_once(
            f"DeepSpeed has loaded {OPERATOR}: this launch leaves 69 MB for each rank in /dev/shm, "
            f"deepspeed_allreduce_buffer_*, which nothing removes. Training does not need it: {REMEDY}"
        )


def _no_operator() -> Any:
    """Return what DeepSpeed's function returns where the operator is not available."""
    return None
