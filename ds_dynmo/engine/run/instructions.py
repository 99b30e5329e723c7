"""The functions that carry out the pipeline instructions on this stage.

The core of each is the function in the engine's present ``_INSTRUCTION_MAP``: DeepSpeed's, or at the end of a batch the
user's. It is wrapped for several outputs, a frozen prefix, tied aliases, callbacks, random streams or a profile. The
functions here take the engine as DeepSpeed's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule

from ds_dynmo.engine.deepspeed import buffers
from ds_dynmo.engine.deepspeed.instruction_map import Instruction, Instructions
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.measure.profiler import Profiler
from ds_dynmo.engine.run import frozen_prefix
from ds_dynmo.engine.run.gradient_flags import GradientFlags
from ds_dynmo.engine.run.random_streams import LayerStreams
from ds_dynmo.engine.split.scheduled import ScheduledBatches
from ds_dynmo.engine.split.steps import InputGradientPass, WeightGradientPass
from ds_dynmo.schedules import Kind
from ds_dynmo.torch_private import no_torch_function

Around = Callable[[Instruction], Instruction]


def compose(
    present: Instructions,
    layers: StageLayers,
    prefix: int,
    *,
    accumulates: bool,
    around_step: Around | None = None,
    callbacks: Sequence[Callable[[], None]],
    streams: LayerStreams | None,
    flags: GradientFlags,
    scheduled: ScheduledBatches | None = None,
) -> Instructions:
    """Compose the instructions of a stage around those of ``present``.

    Args:
        prefix: number of leading layers of the model that are frozen.
        accumulates: whether the optimizer takes gradients after every micro-batch (``BF16_Optimizer``).
        around_step: put around the optimizer's step, within the callbacks; None: nothing is.
        callbacks: of the user, called before the optimizer's step.
        streams: random numbers per layer; None: layers use the rank's generators.
        flags: tensors between stages that get a gradient.
        scheduled: runs a schedule of ds_dynmo; None: DeepSpeed's schedule runs.
    """
    composed = dict(present)

    def put_around(kind: type, around: Around) -> None:
        composed[kind] = around(composed[kind])

    for kind, around in flags.instruction_wrappers(max(layers.indices, default=-1)).items():
        put_around(kind, around)
    put_around(schedule.RecvGrad, _into_new_memory)
    put_around(schedule.BackwardPass, _from_all_outputs)
    for kind, around in frozen_prefix.instruction_wrappers(layers.run, prefix).items():
        put_around(kind, around)
    if layers.tied_aliases or layers.untied_parameters():
        put_around(schedule.ReduceTiedGrads, partial(_of_all_uses, layers))
    if layers.tied_aliases and accumulates and frozen_prefix.has_backward_work(layers.indices, prefix):
        put_around(schedule.BackwardPass, partial(_accumulating_tied_aliases, layers))
    if around_step is not None:
        put_around(schedule.OptimizerStep, around_step)
    if callbacks:
        put_around(schedule.OptimizerStep, partial(_after_callbacks, callbacks))
    if scheduled is not None:
        composed = scheduled.compose(composed)
    if streams is not None:
        composed.update(streams.instructions(composed))
    return MappingProxyType(composed)


def marked(bare: Instructions, profiler: Profiler, *, backward: bool) -> Instructions:
    """Wrap ``bare`` so that the profiler sees the start and end of each pass; ``backward``: with backward passes."""
    around: dict[type, Around] = {schedule.ForwardPass: partial(_measured_pass, profiler, Kind.FORWARD)}
    if backward:
        around[schedule.BackwardPass] = partial(_measured_pass, profiler, Kind.BACKWARD)
        around[InputGradientPass] = partial(_measured_pass, profiler, Kind.INPUT_GRADIENT)
        around[WeightGradientPass] = partial(_measured_pass, profiler, Kind.WEIGHT_GRADIENT)
    return MappingProxyType({kind: around.get(kind, _bare)(instruction) for kind, instruction in bare.items()})


def _bare(instruction: Instruction) -> Instruction:
    return instruction


def _measured_pass(profiler: Profiler, kind: Kind, instruction: Instruction) -> Instruction:
    def measured(engine: Any, *args: Any, **kwargs: Any) -> None:
        with profiler.measure_pass(kind):
            instruction(engine, *args, **kwargs)

    return measured


class _Join(torch.autograd.Function):
    """A tensor without elements whose backward pass runs through several tensors at once, each with its gradient."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


class _JoinedOutput(torch.Tensor):
    """One of several outputs of a stage. Its backward pass waits for the others; then all run as one."""

    __torch_function__ = no_torch_function
    output: torch.Tensor
    waiting: list[tuple[torch.Tensor, torch.Tensor]]  # outputs and their gradients

    def backward(self, gradient: torch.Tensor, retain_graph: bool) -> None:  # type: ignore[override]
        """Wait for the other outputs; the call without ``retain_graph`` is the last one, and runs the pass."""
        self.waiting.append((self.output, gradient))
        if retain_graph:
            return
        outputs, gradients = zip(*self.waiting, strict=True)
        self.waiting.clear()
        joined = _Join.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
        joined.backward(gradient=torch.empty_like(joined))


def _waiting_for_each_other(outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait(output: torch.Tensor) -> torch.Tensor:
        if not output.is_floating_point():
            return output
        joined = output.as_subclass(_JoinedOutput)
        joined.output, joined.waiting = output, waiting
        return joined

    return tuple(wait(output) for output in outputs)


def _into_new_memory(receive: Instruction) -> Instruction:
    """Receive every gradient into new memory: a backward pass may keep the previous one.

    It does so if a stage's last layer adds a parameter to one sample (``hidden + places[None]``): the gradient of the
    parameter is the received tensor in another shape. DeepSpeed (0.19.8, runtime/pipe/engine.py:1178) overwrites it in
    each micro-batch.
    """

    def receive_gradients(engine: Any, buffer_id: int) -> None:
        buffers.forget_gradient_buffer(engine)
        receive(engine, buffer_id=buffer_id)

    return receive_gradients


def _from_all_outputs(backward: Instruction) -> Instruction:
    """Run one backward pass per stage, not one per output tensor.

    DeepSpeed (0.19.8, runtime/pipe/engine.py:853) runs one per output. Layers on which several outputs depend then
    repeat their backward work; a checkpointed layer fails, as it recomputes only once; and gradients are summed in
    another order than on the last stage, so numbers would depend on the partition.
    """

    def backward_pass(engine: Any, buffer_id: int) -> None:
        outputs = buffers.outputs_of(engine, buffer_id)
        if isinstance(outputs, tuple) and not engine.is_last_stage() and not engine.is_pipe_partitioned:
            buffers.set_outputs(engine, buffer_id, _waiting_for_each_other(outputs))
        backward(engine, buffer_id=buffer_id)

    return backward_pass


def _accumulating_tied_aliases(layers: StageLayers, backward: Instruction) -> Instruction:
    def backward_pass(engine: Any, buffer_id: int) -> None:
        backward(engine, buffer_id=buffer_id)
        layers.tied_aliases.accumulate_gradients(buffers.accumulation_dtype(engine))

    return backward_pass


def _of_all_uses(layers: StageLayers, reduce: Instruction) -> Instruction:
    def reduce_tied_gradients(engine: Any) -> None:
        layers.check_untied(buffers.gradient_attribute(engine))
        if engine.using_bf16_optimizer:
            layers.tied_aliases.add_accumulated()
        else:
            layers.tied_aliases.add_gradients()
            for parameter in layers.untied_parameters():  # one use has gradients, and DeepSpeed sums them
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        reduce(engine)

    return reduce_tied_gradients


def _after_callbacks(callbacks: Sequence[Callable[[], None]], step: Instruction) -> Instruction:
    def optimizer_step(engine: Any, *args: Any, **kwargs: Any) -> None:
        for callback in callbacks:
            callback()
        step(engine, *args, **kwargs)

    return optimizer_step
