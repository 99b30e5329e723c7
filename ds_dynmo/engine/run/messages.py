"""The tensors that chunks of layers pass on: what can be sent, and which gradients go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ds_dynmo.engine.comm.message_forms import MessageForm, MessageKind, listed
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import is_only_tensor_of_its_memory


def sendable(outputs: Any, last_layer: int) -> list[torch.Tensor]:
    """Return the outputs of a chunk as a list of tensors.

    Raises:
        ConfigError: they are neither a tensor nor a tuple of tensors, or one is complex and requires a gradient.
    """
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if torch.is_complex(tensor) and tensor.requires_grad]
        if numbers:
            raise ConfigError(
                f"layer {last_layer}, the last one of a stage: its outputs {numbers} are complex and require a "
                "gradient, and pipelines send gradients of floating tensors alone: return torch.view_as_real of them"
            )
        return [*tensors]
    kind = type(outputs).__name__
    if isinstance(outputs, tuple | list):
        kind += f" of {', '.join(type(output).__name__ for output in outputs)}"
    raise ConfigError(
        f"layer {last_layer}, the last one of a stage, returned a {kind}: a stage can send a tensor or a tuple of "
        f"tensors; return one of these, or never cut after it: dynmo.keep_together = [[{last_layer}, {last_layer + 1}]]"
    )


def checked(form: MessageForm, known: MessageForm | None, last_layer: int) -> MessageForm:
    """Return the form that both sides know, if ``form`` fits it: receivers would hang, fail, or keep old elements.

    Raises:
        ConfigError: the number of tensors, or the shape or dtype of one, has changed; or one requires a gradient that
            did not before, which the receiver would not send.
    """
    if known is None:
        return form
    if form.content != known.content or form.in_tuple != known.in_tuple:
        raise ConfigError(
            f"layer {last_layer}, the last one of a stage, returned {listed(form.content)}, and "
            f"{listed(known.content)} in the first micro-batch: give the PipelineModule dynamic_shape=True, or call "
            "engine.reset_activation_shape() on every rank before a batch of another shape"
        )
    new = [number for number, (now, before) in enumerate(zip(form.flags, known.flags)) if now and not before]
    if new:
        raise ConfigError(
            f"layer {last_layer}, the last one of a stage: its outputs {new} require a gradient in this micro-batch "
            "and did not before; give the PipelineModule dynamic_shape=True, and stages tell each other every time"
        )
    return known


def other_strides(form: MessageForm, agreed: MessageForm, kind: MessageKind, last_layer: int) -> str:
    """Describe strides that the receiver of a message does not know."""
    what = "outputs" if kind is MessageKind.ACTIVATION else "gradients that go back"
    return (
        f"layer {last_layer}, the last one of a stage: its {what} have strides {form.strides} in this micro-batch, and "
        f"arrive with {agreed.strides}, as in the first one: last bits may differ from those on one stage; give the "
        "PipelineModule dynamic_shape=True, and stages tell each other every time"
    )


class Entrance:
    """Where received tensors enter the graph of a chunk.

    Their gradients are kept as autograd hands them over: a leaf would lay them out anew, like itself.
    """

    def __init__(self) -> None:
        self._content: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._gradients: list[torch.Tensor | None] = []

    def enter(self, tensors: Sequence[torch.Tensor], form: MessageForm) -> list[torch.Tensor]:
        """Return ``tensors``; those of which a gradient is sent back require one."""
        flagged = [tensor for tensor, flag in zip(tensors, form.flags, strict=True) if flag]
        if not flagged:
            return [*tensors]
        self._content = [(tensor.shape, tensor.dtype, tensor.device) for tensor in flagged]
        self._gradients = [None] * len(flagged)
        anchor = torch.empty(0, requires_grad=True, device="cpu")
        entered = iter(_Enter.apply(self._gradients, *flagged, anchor))  # type: ignore[no-untyped-call]
        return [next(entered) if flag else tensor for tensor, flag in zip(tensors, form.flags)]

    def gradients(self, last_layer: int) -> list[torch.Tensor]:
        """Return the gradients to send back; zeros for tensors that were not used.

        Raises:
            ConfigError: none has a gradient, so the layers before would not train.
        """
        if self._content and all(gradient is None for gradient in self._gradients):
            raise ConfigError(
                f"the layers of a stage, whose last is layer {last_layer}, gave no gradient to anything that the stage "
                "before sent: its layers would not train; return what depends on them, or freeze them and call "
                "engine.model_changed(reason)"
            )
        return [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for (shape, dtype, device), gradient in zip(self._content, self._gradients)
        ]


class _Enter(torch.autograd.Function):
    """Tensors with the memory of received ones, which a layer may change in place."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor | None], *tensors: torch.Tensor) -> Any:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors[:-1])  # the last one lets autograd run this

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        for place, gradient in enumerate(gradients):
            before = ctx.gradients[place]  # of a backward pass that a layer runs by itself
            ctx.gradients[place] = gradient if before is None or gradient is None else before + gradient
        return (None,) * (len(gradients) + 2)


def arranged(tensors: Sequence[torch.Tensor], form: MessageForm) -> Any:
    """Return received tensors as the layer before returned them: one tensor, or a tuple."""
    return tuple(tensors) if form.in_tuple else tensors[0]


def packed_gradients(gradients: Sequence[torch.Tensor], form: MessageForm) -> list[torch.Tensor]:
    """Return what is sent of gradients, in memory of its own.

    A parameter may keep a gradient as its own, and later micro-batches are added to that, in place.
    """
    shared = [
        gradient.layout is not torch.strided or not is_only_tensor_of_its_memory(gradient) for gradient in gradients
    ]
    sent = form.packed(gradients)
    return [
        tensor.clone() if is_shared and tensor.data_ptr() == gradient.data_ptr() else tensor
        for tensor, gradient, is_shared in zip(sent, gradients, shared)
    ]
