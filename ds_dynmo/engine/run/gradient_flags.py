"""Gradients go back only for tensors that have one: not for masks, positions, or tables that layers pass on.

DeepSpeed (0.19.8, runtime/pipe/engine.py:1129, 1187, 1224) makes every floating tensor that a stage receives require a
gradient, sends one back for each, and waits for one for each that was sent. It fails where a mask, or a table of
cosines, has none. Here the sender announces which tensors require a gradient. The receiver differentiates these alone,
and gradients are sent for these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule

from ds_dynmo.engine.comm.channels import MessageShapes
from ds_dynmo.engine.deepspeed import buffers
from ds_dynmo.engine.deepspeed.buffers import is_deepspeeds
from ds_dynmo.engine.deepspeed.instruction_map import Instruction, Instructions
from ds_dynmo.engine.deepspeed.point_to_point import receive_from_previous, send_to_next, shapes_are_known
from ds_dynmo.errors import ConfigError

_MOST = 256  # tensors in a message: DeepSpeed announces their shapes in so many numbers
_INVOLVED = (
    schedule.ForwardPass,
    schedule.SendActivation,
    schedule.RecvActivation,
    schedule.BackwardPass,
    schedule.SendGrad,
    schedule.RecvGrad,
)


class GradientFlags:
    """Which tensors of the messages of one stage get a gradient back.

    They are announced in the first micro-batch that trains after :meth:`forget`, and where shapes change in each one.
    """

    def __init__(self) -> None:
        self._sent: list[bool] | None = None  # to the next stage; None: to be announced
        self._received: list[bool] | None = None  # from the previous one
        self._layout: MessageShapes | None = None  # of what is sent, as DeepSpeed announced it; None: it will

    def forget(self) -> None:
        """Announce anew. Every stage has to forget between the same two batches."""
        self._sent = self._received = None

    def forget_shapes(self) -> None:
        """Announce anew, as DeepSpeed does the shapes."""
        self.forget()
        self._layout = None

    def changes(
        self, present: Instructions, last_layer: int, *, own_kinds: bool
    ) -> Mapping[type, Callable[[Instruction], Instruction]]:
        """List what goes around the instructions of ``present``.

        If an instruction of the user's is among those involved, every floating tensor gets a gradient, as DeepSpeed's
        do. So they do with kinds of the user's: one may send what a pass without gradients gave.

        Args:
            last_layer: number of the last layer of this stage.
            own_kinds: instructions of kinds that DeepSpeed does not have are among ``present``.
        """
        own = own_kinds or any(not is_deepspeeds(present[kind]) for kind in _INVOLVED if kind in present)
        found: dict[type, Callable[[Instruction], Instruction]] = {
            schedule.SendActivation: lambda send: (
                partial(self._send_for_all, send) if own else partial(self._send, send, last_layer)
            ),
            schedule.RecvActivation: lambda receive: partial(self._receive, receive),
        }
        if not own:
            found[schedule.SendGrad] = lambda send: partial(self._send_gradients, send, last_layer)
        if is_deepspeeds(present.get(schedule.LoadMicroBatch)):
            found[schedule.LoadMicroBatch] = lambda load: partial(self._load, load)
        return found

    # -- the instructions -----------------------------------------------------------------------------

    def _load(self, load: Instruction, engine: Any, buffer_id: int) -> None:
        """Load, and differentiate no mask that comes with the tokens.

        DeepSpeed does so for reentrant checkpointing, which works without it here (``checkpoint_any_input``).
        """
        load(engine, buffer_id=buffer_id)
        inputs = buffers.inputs_of(engine, buffer_id)
        if engine.is_first_stage() and isinstance(inputs, tuple):
            for tensor in inputs:
                tensor.requires_grad_(False)

    def _send(self, send: Instruction, last_layer: int, engine: Any, buffer_id: int) -> None:
        """Send, and keep of the outputs only those that a gradient comes back for."""
        outputs = _sendable(buffers.outputs_of(engine, buffer_id), last_layer)
        tensors, are_known = _in_tuple(outputs), shapes_are_known(engine)
        if are_known:
            self._check_layout(last_layer, tensors)
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
        buffers.set_outputs(engine, buffer_id, self._that_go_back(outputs, kept=2 * engine.is_pipe_partitioned))

    def _send_for_all(self, send: Instruction, engine: Any, buffer_id: int) -> None:
        """Send, and let a gradient come back for every floating tensor."""
        send(engine, buffer_id=buffer_id)
        if torch.is_grad_enabled() and (self._sent is None or not shapes_are_known(engine)):
            self._announce(engine, [True] * _MOST)

    def _check_layout(self, last_layer: int, outputs: tuple[torch.Tensor, ...]) -> None:
        """Refuse other tensors than those announced: their receivers would wait, fail, or keep old elements.

        Raises:
            ConfigError: their number, or the shape or dtype of one, has changed.
        """
        layout = [(tensor.shape, tensor.dtype) for tensor in outputs]
        if self._layout is None:
            self._layout = layout
        if layout != self._layout:
            raise ConfigError(
                f"layer {last_layer}, the last one of a stage, returned {_listed(layout)}, and {_listed(self._layout)} "
                "in the first micro-batch: give the PipelineModule dynamic_shape=True, or call "
                "engine.reset_activation_shape() on every rank before a batch of another shape"
            )

    def _announce(self, engine: Any, flags: list[bool]) -> None:
        announced = torch.zeros(_MOST, dtype=torch.uint8, device=engine.device)
        announced[: len(flags)] = torch.tensor(flags, dtype=torch.uint8)
        send_to_next(engine, announced)
        self._sent = flags

    def _that_go_back(self, outputs: Any, kept: int) -> Any:
        """Leave out of ``outputs`` what gets no gradient, but for the first ``kept``."""
        assert self._sent is not None
        if isinstance(outputs, torch.Tensor):
            return _with_graph(outputs) if self._sent[0] else ()
        first, others = outputs[:kept], zip(outputs[kept:], self._sent[kept:])
        return (*first, *(_with_graph(tensor) for tensor, flag in others if flag))

    def _receive(self, receive: Instruction, engine: Any, buffer_id: int) -> None:
        """Receive, and let those tensors require a gradient that get one."""
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
        """Send the gradients of what requires one; of what no layer used, zeros."""
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
        ConfigError: they are no tensor and no tuple of tensors, or one is complex and requires a gradient.
    """
    tensors = _in_tuple(outputs)
    if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        complex_ones = [number for number, one in enumerate(tensors) if one.is_complex() and one.requires_grad]
        if complex_ones:
            raise ConfigError(
                f"layer {last_layer}, the last one of a stage: its outputs {complex_ones} are complex and require a "
                "gradient, and pipelines send gradients of floating tensors alone: return torch.view_as_real of them"
            )
        contiguous = tuple(tensor.contiguous() for tensor in tensors)
        return contiguous if isinstance(outputs, tuple) else contiguous[0]
    found = type(outputs).__name__
    if isinstance(outputs, tuple | list):
        found += f" of {', '.join(type(output).__name__ for output in outputs)}"
    raise ConfigError(
        f"layer {last_layer}, the last one of a stage, returned a {found}: a stage can send a tensor or a tuple of "
        f"tensors; return one of these, or never cut after it: dynmo.keep_together = [[{last_layer}, {last_layer + 1}]]"
    )


def _check_flags(last_layer: int, now: list[bool], before: list[bool]) -> None:
    """Refuse gradients that nobody would send.

    Raises:
        ConfigError: a tensor has come to require a gradient.
    """
    which = [number for number, (flag, flagged) in enumerate(zip(now, before)) if flag and not flagged]
    if which:
        raise ConfigError(
            f"layer {last_layer}, the last one of a stage: its outputs {which} require a gradient in this micro-batch "
            "and did not before; give the PipelineModule dynamic_shape=True, and stages tell each other every time"
        )


def _with_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or if it has lost its graph, what takes the gradient that comes back all the same."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _listed(layout: MessageShapes) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in layout) or "nothing"


def _in_tuple(tensors: Any) -> tuple[Any, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)
