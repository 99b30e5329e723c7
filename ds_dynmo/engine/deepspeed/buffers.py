"""The buffers of DeepSpeed's pipeline engine, one for each micro-batch in flight, by the number in an instruction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def inputs_of(engine: Any, buffer_id: int) -> Any:
    """Return what a stage received or loaded: a tensor or a tuple."""
    return engine.pipe_buffers["inputs"][buffer_id]


def set_inputs(engine: Any, buffer_id: int, inputs: Any) -> None:
    """Set the inputs of a stage, whose gradients are sent back."""
    engine.pipe_buffers["inputs"][buffer_id] = inputs


def outputs_of(engine: Any, buffer_id: int) -> Any:
    """Return the outputs of a stage's layers: a tensor or a tuple."""
    return engine.pipe_buffers["outputs"][buffer_id]


def set_outputs(engine: Any, buffer_id: int, outputs: Any) -> None:
    """Set the outputs of a stage, at which the backward pass begins."""
    engine.pipe_buffers["outputs"][buffer_id] = outputs


def loss_of(engine: Any) -> Any:
    """Return the output of the last forward pass on the last stage: there is one place for all micro-batches."""
    return engine.loss


def set_loss(engine: Any, loss: Any) -> None:
    """Set the loss of the last stage, at which its backward pass begins."""
    engine.loss = loss


def free_inputs(engine: Any, buffer_id: int) -> None:
    """Free what a stage received, as DeepSpeed does once it has sent its gradient."""
    engine.pipe_buffers["inputs"][buffer_id] = None


def free_outputs(engine: Any, buffer_id: int) -> None:
    """Free the outputs of a stage's layers, as DeepSpeed does after their backward pass."""
    engine.pipe_buffers["output_tensors"][buffer_id] = None
    engine.pipe_buffers["outputs"][buffer_id] = None


def forget_gradient_buffer(engine: Any) -> None:
    """Let the next gradients be received into new tensors: a backward pass may keep the last ones."""
    engine.grad_layer = None


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


@contextmanager
def sent_as_they_are(engine: Any) -> Iterator[None]:
    """Let no instruction of a batch that runs inside treat the last tensor of a message as a mask.

    DeepSpeed sends that as fp16 and receives it as bool after ``set_has_attention_mask(True)``, with
    ``has_bool_tensors``, and where the class of the model is called GPT2ModelPipe: also hidden states, where a boundary
    comes to lie behind the last layer that returns a mask.
    """
    before = engine.has_attention_mask, engine.has_bool_tensors
    engine.has_attention_mask = engine.has_bool_tensors = False
    try:
        yield
    finally:
        engine.has_attention_mask, engine.has_bool_tensors = before


def accumulation_dtype(engine: Any) -> torch.dtype:
    """Return the precision in which ``BF16_Optimizer`` sums gradients over micro-batches."""
    dtype: torch.dtype = engine.optimizer.grad_acc_dtype
    return dtype


def gradient_attribute(engine: Any) -> str:
    """Return the name of the attribute of a tied parameter that DeepSpeed sums over stages."""
    return "_hp_grad" if engine.using_bf16_optimizer else "grad"
