"""The buffers of DeepSpeed's pipeline engine, one for each micro-batch in flight, by the number in an instruction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.pipe import engine as deepspeeds


def is_deepspeeds(instruction: Any) -> bool:
    """Is it the function by which DeepSpeed carries out an instruction? (A name would be copied by ``wraps``.)"""
    return getattr(instruction, "__globals__", None) is vars(deepspeeds)


def inputs_of(engine: Any, buffer_id: int) -> Any:
    """What a stage received or loaded: a tensor or a tuple."""
    return engine.pipe_buffers["inputs"][buffer_id]


def outputs_of(engine: Any, buffer_id: int) -> Any:
    """What the layers of a stage gave: a tensor or a tuple."""
    return engine.pipe_buffers["outputs"][buffer_id]


def set_outputs(engine: Any, buffer_id: int, outputs: Any) -> None:
    """Let the backward pass begin at ``outputs``."""
    engine.pipe_buffers["outputs"][buffer_id] = outputs


def free_inputs(engine: Any, buffer_id: int) -> None:
    """Let go of what a stage received, as DeepSpeed does once it has sent the gradient of it."""
    engine.pipe_buffers["inputs"][buffer_id] = None


def free_outputs(engine: Any, buffer_id: int) -> None:
    """Let go of what the layers gave, as DeepSpeed does once it has gone back through them."""
    engine.pipe_buffers["output_tensors"][buffer_id] = None
    engine.pipe_buffers["outputs"][buffer_id] = None


@contextmanager
def backward_from(engine: Any, loss: torch.Tensor, gradient: torch.Tensor) -> Iterator[None]:
    """Inside, a backward pass begins at ``loss`` on the last stage, with ``gradient`` on the others."""
    before = engine.loss, engine.grad_layer
    engine.loss, engine.grad_layer = loss, gradient
    try:
        yield
    finally:
        engine.loss, engine.grad_layer = before


def free_buffers(engine: Any) -> None:
    """Free the buffers of a pipeline engine, and forget which shapes were announced to neighbours."""
    engine.reset_activation_shape()
    engine.first_gradient_send = True
    engine.num_pipe_buffers = 0
    for buffers in engine.pipe_buffers.values():
        buffers.clear()


def free_losses(engine: Any) -> None:
    """Drop the losses of the last batch, whose graphs hold layers."""
    engine.loss = engine.total_loss = engine.total_additional_losses = None


def forget_total_loss(engine: Any) -> None:
    """Drop the sum of an earlier batch's losses: DeepSpeed would add those of an evaluation to it."""
    engine.total_loss = engine.total_additional_losses = None


def accumulation_dtype(engine: Any) -> torch.dtype:
    """In which precision ``BF16_Optimizer`` sums gradients over micro-batches."""
    dtype: torch.dtype = engine.optimizer.grad_acc_dtype
    return dtype


def gradient_attribute(engine: Any) -> str:
    """The attribute of a parameter whose content DeepSpeed sums over the stages that tie it."""
    return "_hp_grad" if engine.using_bf16_optimizer else "grad"
