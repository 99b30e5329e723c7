"""Which function carries out each of DeepSpeed's pipeline instructions on this stage.

DeepSpeed's own do, but for what a frozen prefix, twins of tied layers, callbacks, random streams or a profile need.
These functions take the engine as DeepSpeed's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    changed: Instructions = frozen.instructions(layers.start, layers.stop, prefix)
    if layers.has_twins:
        changed[schedule.ReduceTiedGrads] = _reduce_tied_gradients
        if accumulates and prefix < layers.stop:
            changed[schedule.BackwardPass] = _backward_and_accumulate_twins
    if calls_back:
        changed[schedule.OptimizerStep] = _call_back_and_step
    if streams is not None:
        changed.update(streams.instructions({**stock, **changed}))
    return {**stock, **changed} if changed else stock


def marked(bare: Instructions, *, backward: bool) -> Instructions:
    """``bare`` with the passes of every micro-batch marked for the profiler; ``backward``: there are such passes."""
    passes = {schedule.ForwardPass: False, **({schedule.BackwardPass: True} if backward else {})}
    return {**bare, **{kind: _one_pass(bare[kind], is_backward) for kind, is_backward in passes.items()}}


def _one_pass(instruction: Callable[..., None], is_backward: bool) -> Callable[..., None]:
    def one_pass(engine: Any, buffer_id: int) -> None:
        with engine._profiler.one_pass(backward=is_backward):
            instruction(engine, buffer_id)

    return one_pass


def _backward_and_accumulate_twins(engine: Any, buffer_id: int) -> None:
    PipelineEngine._exec_backward_pass(engine, buffer_id)
    engine._layers.accumulate_twin_gradients(engine.optimizer.grad_acc_dtype)


def _reduce_tied_gradients(engine: Any) -> None:
    if engine.using_bf16_optimizer:
        engine._layers.fold_twin_sums()
    else:
        engine._layers.fold_twin_gradients()
    PipelineEngine._exec_reduce_tied_grads(engine)


def _call_back_and_step(engine: Any) -> None:
    for callback in engine._step_callbacks:
        callback()
    PipelineEngine._exec_optimizer_step(engine)
