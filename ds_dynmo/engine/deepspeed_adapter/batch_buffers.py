"""What DeepSpeed's pipeline engine keeps of the last batch (read in 0.19.8, runtime/pipe/engine.py)."""

from __future__ import annotations

from typing import Any


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
