"""DeepSpeed's part of a pass: data, the engine's forward and backward, the loss, timers (read in DeepSpeed 0.19.8).

``PipelineEngine`` (runtime/pipe/engine.py) puts these into its instructions, together with buffers and messages. Here
they take and return values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import engine as deepspeeds
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.autograd.graph import GradientEdge

_MESSAGE_TIMERS = {
    ("send", "activation"): deepspeeds.PIPE_SEND_OUTPUT_TIMER,
    ("send", "gradient"): deepspeeds.PIPE_SEND_GRAD_TIMER,
    ("receive", "activation"): deepspeeds.PIPE_RECV_INPUT_TIMER,
    ("receive", "gradient"): deepspeeds.PIPE_RECV_GRAD_TIMER,
}


def load_micro_batch(engine: Any) -> tuple[Any, Any]:
    """Read a micro-batch on the first or the last stage, by DeepSpeed's function.

    Where the loss is on another stage, the last one reads its data all the same, if it was given any, so that they are
    right when the loss comes back to it.

    Returns:
        The inputs, on the first stage, and the labels, where the loss is; None elsewhere. No input requires a gradient:
        DeepSpeed lets them require one for reentrant checkpointing, which needs none here (``checkpoint_any_input``).
    """
    reads_for_order = not (engine.is_first_stage() or engine.is_last_stage())
    if reads_for_order and engine.data_iterator is None and engine.batch_fn is None:
        return None, None
    engine._reserve_pipe_buffers(1)
    PipelineEngine._exec_load_micro_batch(engine, 0)
    buffers = engine.pipe_buffers
    inputs, labels = buffers["inputs"][0], buffers["labels"][0]
    buffers["inputs"][0] = buffers["labels"][0] = None
    for tensor in inputs if isinstance(inputs, tuple) else (inputs,):
        if isinstance(tensor, torch.Tensor):
            tensor.requires_grad = False
    return inputs, labels


def begin_batch(engine: Any) -> int:
    """Forget the losses of the batch before: DeepSpeed would add those of an evaluation to them.

    Returns:
        The number of its first micro-batch since the start of the run.
    """
    engine.fwd_outputs = []
    engine.total_loss = engine.total_additional_losses = None
    number: int = engine.module.micro_offset
    return number


def forward(engine: Any, inputs: Any, micro_batch: int) -> Any:
    """Run the layers of a chunk.

    Args:
        micro_batch: its number since the start of the run, which seeds layers. DeepSpeed counts passes, and a stage
            with two chunks has two of each micro-batch.
    """
    engine.module.micro_offset = micro_batch
    engine.tput_timer.start()
    outputs = DeepSpeedEngine.forward(engine, inputs)
    if not engine.module.training:
        ds_checkpointing.reset()
    return outputs


def loss_of(engine: Any, outputs: Any, labels: Any) -> Any:
    """Compute the loss of the last chunk's outputs, and add it to the batch's losses, as DeepSpeed does."""
    loss_fn = engine.module.loss_fn
    loss = loss_fn(outputs, labels) if engine._compute_loss and loss_fn is not None else outputs
    if engine.eval_return_logits:
        engine.outputs = outputs
    detached = _detached(loss)
    engine.loss = detached
    engine.fwd_outputs.append(detached)
    engine.total_loss = _added(engine.total_loss, detached)
    additional = engine.module.get_additional_losses()
    if additional is not None:
        totals = engine.total_additional_losses = engine.total_additional_losses or OrderedDict()
        for name, value in additional.items():
            totals[name] = _added(totals.get(name), _detached(value))
    return loss


def _detached(loss: Any) -> Any:
    return loss.detach() if isinstance(loss, torch.Tensor) else [each.detach() for each in loss]


def _added(total: Any, loss: Any) -> Any:
    """Add a loss to a sum, in place; None: it is the first."""
    if isinstance(loss, torch.Tensor):
        total = torch.zeros_like(loss) if total is None else total
        total += loss
        return total
    return [_added(sum_, each) for sum_, each in zip(total or [None] * len(loss), loss, strict=True)]


def backward_from_loss(engine: Any, loss: torch.Tensor) -> None:
    """Run the backward pass of the last chunk, with the scaling of losses."""
    assert engine.optimizer is not None, "training needs an optimizer"
    DeepSpeedEngine.backward(engine, loss)


def backward_from(engine: Any, outputs: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """Run the backward pass of another chunk: one, from all outputs.

    DeepSpeed runs one per output. Layers on which several outputs depend then repeat their backward work; a
    checkpointed layer fails, as it recomputes only once; and gradients are summed in another order than on the last
    stage, so numbers would depend on the partition.
    """
    with _backward_of_engine(engine):
        torch.autograd.backward(tuple(outputs), tuple(gradients))


def backward_from_each(engine: Any, roots: Sequence[torch.Tensor]) -> None:
    """Run autograd's backward pass from each of ``roots``, which are scalars; parameters see one pass.

    The last chunk computes its loss's gradient elsewhere, and outputs of the last pass have hooks that ``roots`` lack.
    So on every stage this is the pass of a stage before the last.
    """
    with _backward_of_engine(engine):
        for root in roots:
            root.backward()


@contextmanager
def _backward_of_engine(engine: Any) -> Iterator[None]:
    """Run a backward pass inside as DeepSpeed's stages before the last do.

    ``BF16_Optimizer`` does not run this pass, but clears the gradients of the last pass before it and accumulates those
    of this one after it.
    """
    timers = engine.engine_timers.backward_timers + engine.engine_timers.backward_inner_timers
    engine._start_timers(timers)
    if engine.using_bf16_optimizer:
        engine.optimizer.clear_lp_grads()
    engine._running_engine_backward = True  # else a hook takes the pass for one that the user runs
    try:
        yield
    finally:
        engine._running_engine_backward = False
    if engine.using_bf16_optimizer and not engine._config.bfloat16_config.immediate_grad_update:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)
    engine._stop_timers(timers)


def accumulation_dtype(engine: Any) -> torch.dtype:
    """Return the precision in which ``BF16_Optimizer`` sums gradients over micro-batches."""
    dtype: torch.dtype = engine.optimizer.grad_acc_dtype
    return dtype


def gradient_attribute(engine: Any) -> str:
    """Return the name of the attribute of a tied parameter that DeepSpeed sums over stages."""
    return "_hp_grad" if engine.using_bf16_optimizer else "grad"


def message_timer(engine: Any, category: str, what: str) -> Any:
    """Return DeepSpeed's timer of sends or receives; None unless ``wall_clock_breakdown`` asks for it."""
    return engine.timers(_MESSAGE_TIMERS[category, what]) if engine.wall_clock_breakdown() else None
