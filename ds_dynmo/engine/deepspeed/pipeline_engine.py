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
        optimizer: the optimizer, or DeepSpeed's wrapper around it.
        basic_optimizer: the optimizer inside the wrapper.
        data_iterator: where this rank reads its data; None: it reads none.
        training_data: the data set given to ``initialize``; None: it was given none.
    """

    module: Any
    grid: Any
    device: torch.device
    global_steps: int
    global_samples: int
    micro_batches: int
    num_stages: int
    optimizer: Any
    basic_optimizer: Any
    lr_scheduler: Any
    data_iterator: Any
    training_data: Any
    is_pipe_partitioned: bool
    using_bf16_optimizer: bool

    def is_first_stage(self) -> bool: ...

    def is_last_stage(self) -> bool: ...

    def train_batch_size(self) -> int: ...

    def set_train_batch_size(self, train_batch_size: int) -> None: ...

    def train_micro_batch_size_per_gpu(self) -> int: ...

    def deepspeed_io(self, dataset: Any, *, data_sampler: Any) -> Any: ...

    def set_dataloader(self, loader: Any) -> None: ...
