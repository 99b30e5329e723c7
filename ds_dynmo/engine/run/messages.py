"""The tensors that chunks of layers pass on: what can be sent, and which gradients go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_dynmo.engine.comm.message_forms import MessageForm, listed
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import is_only_tensor_of_its_memory


def sendable(outputs: Any, last_layer: int) -> list[torch.Tensor]:
    """Return the outputs of a chunk with contiguous memory, which a message needs.

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
        return [torch.Tensor.contiguous(tensor) for tensor in tensors]
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


def require_gradients(tensors: Sequence[torch.Tensor], form: MessageForm) -> list[torch.Tensor]:
    """Let received tensors require a gradient if one is sent back, and return these."""
    flagged = [tensor for tensor, flag in zip(tensors, form.flags, strict=True) if flag]
    for tensor in flagged:
        tensor.requires_grad_()
    return flagged


def arranged(tensors: Sequence[torch.Tensor], form: MessageForm) -> Any:
    """Return received tensors as the layer before returned them: one tensor, or a tuple."""
    return tuple(tensors) if form.in_tuple else tensors[0]


def cloned(inputs: Any) -> Any:
    """Copy the inputs of a chunk that require a gradient: a layer may change its input in place, but no leaf."""
    if isinstance(inputs, tuple):
        return tuple(cloned(each) for each in inputs)
    return inputs.clone() if inputs.requires_grad else inputs


def gradients_of(inputs: Sequence[torch.Tensor], last_layer: int) -> list[torch.Tensor]:
    """Return the gradients of a chunk's inputs; zeros for unused ones.

    A gradient that a parameter keeps as its own is copied: later micro-batches are added to that, in place.

    Raises:
        ConfigError: none has a gradient, so the layers before would not train.
    """
    if inputs and all(tensor.grad is None for tensor in inputs):
        raise ConfigError(
            f"the layers of a stage, whose last is layer {last_layer}, gave no gradient to anything that the stage "
            "before sent: its layers would not train; return what depends on them, or freeze them and call "
            "engine.model_changed(reason)"
        )
    gradients = []
    for tensor in inputs:
        gradient, tensor.grad = tensor.grad, None
        if gradient is None:
            gradient = torch.zeros_like(tensor)
        alone = gradient.layout is torch.strided and is_only_tensor_of_its_memory(gradient)
        gradients.append(gradient.contiguous() if alone else gradient.clone(memory_format=torch.contiguous_format))
    return gradients
