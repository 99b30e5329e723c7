"""Gradient messages only for tensors that require a gradient: not for masks, positions or tables passed by layers.

DeepSpeed (0.19.8, runtime/pipe/engine.py:1129, 1187, 1224) lets every received floating tensor require a gradient,
sends one back for each, and waits for one for each sent tensor. It fails if a mask or a table of cosines has none. Here
the sender announces which tensors require a gradient, and gradients are computed and sent only for these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule

from ds_dynmo.engine.comm.channels import MessageShapes
from ds_dynmo.engine.deepspeed import buffers
from ds_dynmo.engine.deepspeed.instruction_map import Instruction
from ds_dynmo.engine.deepspeed.point_to_point import receive_from_previous, send_to_next, shapes_are_known
from ds_dynmo.errors import ConfigError

_MOST = 256  # tensors in a message: DeepSpeed's limit


class GradientFlags:
    """The tensors of one stage's messages for which gradients are sent back.

    They are announced in the first training micro-batch after :meth:`forget_flags`, or in each one if shapes change.
    """

    def __init__(self) -> None:
        self._sent: list[bool] | None = None  # to the next stage; None: announce them in the next message
        self._received: list[bool] | None = None  # from the previous one
        self._shapes: MessageShapes | None = None  # sent shapes, as announced by DeepSpeed; None: not yet

    def forget_flags(self) -> None:
        """Make the next message announce its flags again. Every stage has to call this between the same two batches."""
        self._sent = self._received = None

    def forget_shapes(self) -> None:
        """Make the next message announce its flags again, as DeepSpeed does with shapes."""
        self.forget_flags()
        self._shapes = None

    def instruction_wrappers(self, last_layer: int) -> Mapping[type, Callable[[Instruction], Instruction]]:
        """Return the wrappers of a stage's instructions.

        Args:
            last_layer: number of the last layer of this stage.
        """
        return {
            schedule.LoadMicroBatch: lambda load: partial(self._load, load),
            schedule.SendActivation: lambda send: partial(self._send, send, last_layer),
            schedule.RecvActivation: lambda receive: partial(self._receive, receive),
            schedule.SendGrad: lambda send: partial(self._send_gradients, send, last_layer),
        }

    # -- the instructions -----------------------------------------------------------------------------

    def _load(self, load: Instruction, engine: Any, buffer_id: int) -> None:
        """Load a micro-batch whose masks require no gradient.

        DeepSpeed lets them require one for reentrant checkpointing, which needs none here (``checkpoint_any_input``).
        """
        load(engine, buffer_id=buffer_id)
        inputs = buffers.inputs_of(engine, buffer_id)
        if engine.is_first_stage() and isinstance(inputs, tuple):
            for tensor in inputs:
                tensor.requires_grad_(False)

    def _send(self, send: Instruction, last_layer: int, engine: Any, buffer_id: int) -> None:
        """Send the outputs, and keep only those for which a gradient comes back."""
        outputs = _sendable(buffers.outputs_of(engine, buffer_id), last_layer)
        tensors, are_known = _in_tuple(outputs), shapes_are_known(engine)
        if are_known:
            self._check_shapes(last_layer, tensors)
        buffers.set_outputs(engine, buffer_id, outputs)
        send(engine, buffer_id=buffer_id)
        if not torch.is_grad_enabled():  # an evaluation
            return
        flags = [tensor.requires_grad for tensor in tensors]
        if engine.is_pipe_partitioned:
            flags[1] = True  # a slice of the first output, whose graph DeepSpeed keeps elsewhere
        if self._sent is None or not are_known:
            self._announce(engine, flags)
        elif flags != self._sent:
            _check_flags(last_layer, flags, self._sent)
        buffers.set_outputs(engine, buffer_id, self._with_gradients(outputs, kept=2 * engine.is_pipe_partitioned))

    def _check_shapes(self, last_layer: int, outputs: tuple[torch.Tensor, ...]) -> None:
        """Refuse tensors that differ from those announced: receivers would hang, fail, or keep old elements.

        Raises:
            ConfigError: their number, or the shape or dtype of one, has changed.
        """
        shapes = [(tensor.shape, tensor.dtype) for tensor in outputs]
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            raise ConfigError(
                f"layer {last_layer}, the last one of a stage, returned {_listed(shapes)}, and {_listed(self._shapes)} "
                "in the first micro-batch: give the PipelineModule dynamic_shape=True, or call "
                "engine.reset_activation_shape() on every rank before a batch of another shape"
            )

    def _announce(self, engine: Any, flags: list[bool]) -> None:
        announced = torch.zeros(_MOST, dtype=torch.uint8, device=engine.device)
        announced[: len(flags)] = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        send_to_next(engine, announced)
        self._sent = flags

    def _with_gradients(self, outputs: Any, kept: int) -> Any:
        """Remove outputs without a gradient, except the first ``kept``."""
        assert self._sent is not None
        if isinstance(outputs, torch.Tensor):
            return _with_graph(outputs) if self._sent[0] else ()
        first, others = outputs[:kept], zip(outputs[kept:], self._sent[kept:])
        return (*first, *(_with_graph(tensor) for tensor, flag in others if flag))

    def _receive(self, receive: Instruction, engine: Any, buffer_id: int) -> None:
        """Receive tensors, and let those require a gradient for which one is sent."""
        receive(engine, buffer_id=buffer_id)
        if not torch.is_grad_enabled():
            return
        if self._received is None or not shapes_are_known(engine):
            announced = torch.empty(_MOST, dtype=torch.uint8, device=engine.device)
            receive_from_previous(engine, announced)
            self._received = announced.bool().tolist()
        for tensor, flag in zip(_in_tuple(buffers.inputs_of(engine, buffer_id)), self._received):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.is_leaf:
                tensor.requires_grad_(flag)

    def _send_gradients(self, send: Instruction, last_layer: int, engine: Any, buffer_id: int) -> None:
        """Send the gradients of tensors that require one; zeros for unused tensors."""
        inputs = buffers.inputs_of(engine, buffer_id)
        if not engine.is_pipe_partitioned:
            tensors = _in_tuple(inputs)
            differentiated = [tensor for tensor in tensors if tensor.requires_grad]
            if differentiated and all(tensor.grad is None for tensor in differentiated):
                raise ConfigError(
                    f"the layers of a stage, whose last is layer {last_layer}, gave no gradient to anything that the "
                    "stage before sent: its layers would not train; return what depends on them, or freeze them and "
                    "call engine.model_changed(reason)"
                )
            for tensor in differentiated:
                if tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor)
            if isinstance(inputs, tuple) or not differentiated:
                buffers.set_inputs(engine, buffer_id, tuple(differentiated))
        send(engine, buffer_id=buffer_id)


def _sendable(outputs: Any, last_layer: int) -> Any:
    """Return the outputs with contiguous memory, which a message needs.

    Raises:
        ConfigError: they are neither a tensor nor a tuple of tensors, or one is complex and requires a gradient.
    """
    tensors = _in_tuple(outputs)
    if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if tensor.is_complex() and tensor.requires_grad]
        if numbers:
            raise ConfigError(
                f"layer {last_layer}, the last one of a stage: its outputs {numbers} are complex and require a "
                "gradient, and pipelines send gradients of floating tensors alone: return torch.view_as_real of them"
            )
        contiguous = tuple(tensor.contiguous() for tensor in tensors)
        return contiguous if isinstance(outputs, tuple) else contiguous[0]
    kind = type(outputs).__name__
    if isinstance(outputs, tuple | list):
        kind += f" of {', '.join(type(output).__name__ for output in outputs)}"
    raise ConfigError(
        f"layer {last_layer}, the last one of a stage, returned a {kind}: a stage can send a tensor or a tuple of "
        f"tensors; return one of these, or never cut after it: dynmo.keep_together = [[{last_layer}, {last_layer + 1}]]"
    )


def _check_flags(last_layer: int, now: list[bool], before: list[bool]) -> None:
    """Refuse new tensors with gradients, which the receiver would not send.

    Raises:
        ConfigError: a tensor requires a gradient that did not before.
    """
    which = [number for number, (flag, flagged) in enumerate(zip(now, before)) if flag and not flagged]
    if which:
        raise ConfigError(
            f"layer {last_layer}, the last one of a stage: its outputs {which} require a gradient in this micro-batch "
            "and did not before; give the PipelineModule dynamic_shape=True, and stages tell each other every time"
        )


def _with_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a leaf that takes the gradient if the tensor has lost its graph."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _listed(shapes: MessageShapes) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in shapes) or "nothing"


def _in_tuple(tensors: Any) -> tuple[Any, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)
