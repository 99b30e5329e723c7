"""Which function carries out each of DeepSpeed's pipeline instructions on this stage.

DeepSpeed's own do, but for what several outputs, a frozen prefix, twins of tied layers, callbacks, random streams or a
profile need.
These functions take the engine as DeepSpeed's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_dynmo.engine import frozen
from ds_dynmo.engine.randomness import LayerStreams
from ds_dynmo.engine.stage import StageLayers

Instructions = dict[type, Callable[..., None]]


def instructions(
    layers: StageLayers, prefix: int, *, accumulates: bool, calls_back: bool, streams: LayerStreams | None
) -> Instructions:
    """The instructions of a stage.

    Args:
        prefix: how many leading layers of the model are frozen.
        accumulates: the optimizer takes gradients after every micro-batch (``BF16_Optimizer``).
        calls_back: the user has something to do before a step.
        streams: of random numbers per layer; None: layers draw from the rank's.
    """
    stock: Instructions = PipelineEngine._INSTRUCTION_MAP
    changed: Instructions = {schedule.BackwardPass: _backward_from_all_outputs}
    changed.update(frozen.instructions(layers.start, layers.stop, prefix))
    if layers.has_twins or layers.has_copies:
        changed[schedule.ReduceTiedGrads] = _reduce_tied_gradients
    if layers.has_twins and accumulates and prefix < layers.stop:
        changed[schedule.BackwardPass] = _backward_and_accumulate_twins
    if calls_back:
        changed[schedule.OptimizerStep] = _call_back_and_step
    if streams is not None:
        changed.update(streams.instructions({**stock, **changed}))
    return {**stock, **changed}


def marked(bare: Instructions, *, backward: bool) -> Instructions:
    """``bare`` with the passes of every micro-batch marked for the profiler; ``backward``: there are such passes."""
    passes = {schedule.ForwardPass: False, **({schedule.BackwardPass: True} if backward else {})}
    return {**bare, **{kind: _one_pass(bare[kind], is_backward) for kind, is_backward in passes.items()}}


def _one_pass(instruction: Callable[..., None], is_backward: bool) -> Callable[..., None]:
    def one_pass(engine: Any, buffer_id: int) -> None:
        with engine._profiler.one_pass(backward=is_backward):
            instruction(engine, buffer_id)

    return one_pass


class _Join(torch.autograd.Function):
    """Something of no elements whose gradient is that of several tensors."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        return (None, *ctx.gradients)


def _backward_from_all_outputs(engine: Any, buffer_id: int) -> None:
    """One pass for all outputs of a stage that sends a tuple.

    DeepSpeed (0.19.8, runtime/pipe/engine.py:853) runs a pass for each: all layers that several outputs depend on
    do their backward work again, one that is checkpointed fails, as it recomputes once only, and gradients are summed
    in another order than on the last stage, so that numbers would depend on where a stage ends.
    """
    outputs, gradients = engine.pipe_buffers["outputs"][buffer_id], engine.grad_layer
    if engine.is_last_stage() or engine.is_pipe_partitioned or not isinstance(outputs, tuple):
        PipelineEngine._exec_backward_pass(engine, buffer_id)
        return
    joined = _Join.apply(tuple(gradients), *(output for output in outputs if output.is_floating_point()))
    engine.pipe_buffers["outputs"][buffer_id], engine.grad_layer = joined, torch.empty_like(joined)
    PipelineEngine._exec_backward_pass(engine, buffer_id)
    engine.grad_layer = gradients  # DeepSpeed receives the next ones into them


def _backward_and_accumulate_twins(engine: Any, buffer_id: int) -> None:
    _backward_from_all_outputs(engine, buffer_id)
    engine._layers.accumulate_twin_gradients(engine.optimizer.grad_acc_dtype)


def _reduce_tied_gradients(engine: Any) -> None:
    if engine.using_bf16_optimizer:
        engine._layers.fold_twin_sums()
    else:
        engine._layers.fold_twin_gradients()
    gradient = "_hp_grad" if engine.using_bf16_optimizer else "grad"  # as DeepSpeed sums it over the stages
    engine._layers.join_copies(gradient)
    PipelineEngine._exec_reduce_tied_grads(engine)
    engine._layers.share_copies(gradient)


def _call_back_and_step(engine: Any) -> None:
    for callback in engine._step_callbacks:
        callback()
    PipelineEngine._exec_optimizer_step(engine)
