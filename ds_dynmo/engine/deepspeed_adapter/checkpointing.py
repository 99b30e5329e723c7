"""DeepSpeed's activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing

TRACKER = "_CUDA_RNG_STATE_TRACKER"  # the global of Megatron's modules and of DeepSpeed's that holds their tracker


def deepspeeds_tracker() -> Any:
    """Return DeepSpeed's tracker of the named random states that layers fork, like Megatron's."""
    return ds_checkpointing.get_cuda_rng_tracker()


def checkpointing_mpu() -> Any:
    """Return the ``mpu`` that activation checkpointing was configured with; None if there is none."""
    return ds_checkpointing.mpu


def is_reentrant(module: Any) -> bool:
    """Tell whether a PipelineModule that checkpoints activations does so the reentrant way."""
    return module.activation_checkpoint_func is not ds_checkpointing.non_reentrant_checkpoint


def checkpoint_any_input(module: Any) -> None:
    """Let reentrant checkpointing of a PipelineModule work where no input needs a gradient.

    It loses the gradients of a segment none of whose inputs requires one (token ids, the output of a frozen prefix):
    such a segment is checkpointed the non-reentrant way.
    """
    if is_reentrant(module):
        module.activation_checkpoint_func = any_input(module.activation_checkpoint_func)


def any_input(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``checkpoint``: a segment none of whose inputs requires a gradient is checkpointed the non-reentrant way."""

    @wraps(checkpoint)
    def of_any_input(function: Callable[..., Any], *inputs: Any) -> Any:
        if torch.is_grad_enabled() and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
            return ds_checkpointing.non_reentrant_checkpoint(function, *inputs)
        return checkpoint(function, *inputs)

    return of_any_input
