"""The attributes of DeepSpeed's engine that components of ds_dynmo's engine use, with their types."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class DeepSpeedPipeline(Protocol):
    """DeepSpeed's part of a pipeline engine, under DeepSpeed's names.

    Attributes:
        module: the ``PipelineModule``.
        grid: the ``PipelineParallelGrid``.
        global_steps, global_samples: batches and samples trained on.
        micro_batches: of a batch, on each rank.
        num_stages: stages of the pipeline.
        dynamic_shape: whether messages between stages may change their shapes.
        optimizer: the optimizer, or DeepSpeed's wrapper around it.
    """

    module: Any
    grid: Any
    device: torch.device
    global_steps: int
    global_samples: int
    micro_batches: int
    dynamic_shape: bool
    num_stages: int
    optimizer: Any
    is_pipe_partitioned: bool
    using_bf16_optimizer: bool

    def is_first_stage(self) -> bool: ...

    def is_last_stage(self) -> bool: ...
