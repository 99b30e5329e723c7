"""A frozen prefix of the model, without backward work and gradient messages.

The prefix consists of the leading layers without trainable parameters. A stage inside it skips its backward passes, its
successor sends no gradients, and the stage in which the prefix ends receives activations without gradient (DeepSpeed
0.19.8 lets every received activation require one: runtime/pipe/engine.py:1129, 1152). These functions replace or wrap
pipeline instructions, and take the engine as DeepSpeed's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from torch import nn

from ds_dynmo.engine.deepspeed import buffers
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.errors import ConfigError

Instruction = Callable[..., None]


def trains(module: nn.Module) -> bool:
    """Return whether a layer has trainable parameters."""
    return any(parameter.requires_grad for parameter in module.parameters())


def check_ties(layers: StageLayers, trainable: Sequence[bool]) -> None:
    """Refuse a tie of which only some uses are frozen.

    Args:
        trainable: per layer of the model, whether it has trainable parameters; the same on every rank.

    Raises:
        ConfigError: on every rank.
    """
    for key in layers.tied_keys():
        uses = layers.uses(key)
        if len({trainable[use] for use in uses}) > 1:
            raise ConfigError(
                f"layers {uses} are tied by the key {key!r}, but only layers {[u for u in uses if trainable[u]]} have "
                "something to train: freeze all of them, or untie them"
            )


def check_unchanged(layers: StageLayers, trainable: Sequence[bool]) -> None:
    """Refuse to train after layers were frozen or unfrozen without ``engine.model_changed``.

    Args:
        trainable: per layer of the model, whether it was trainable at the last ``engine.model_changed``.
    """
    for index, module in layers.modules().items():
        if trains(module) != trainable[index]:
            change = "frozen" if trainable[index] else "unfrozen"
            raise ConfigError(
                f"layer {index} was {change}: call engine.model_changed(reason) on every rank after layers are "
                "frozen or unfrozen"
            )


def frozen_prefix(trainable: Sequence[bool]) -> int:
    """Count the leading layers without trainable parameters.

    >>> frozen_prefix([False, False, True, False])
    2
    """
    return next((index for index, trains in enumerate(trainable) if trains), len(trainable))


def has_backward_work(layers: Iterable[int], prefix: int) -> bool:
    """Return whether a backward pass has work in these layers: one of them is behind the frozen prefix."""
    return any(layer >= prefix for layer in layers)


def instruction_wrappers(chunk: range, prefix: int) -> dict[type, Callable[[Instruction], Instruction]]:
    """Return the wrappers or replacements of a chunk's instructions.

    Args:
        chunk: layers of the chunk.
        prefix: number of leading layers of the model that are frozen.
    """
    changed: dict[type, Callable[[Instruction], Instruction]] = {}
    if prefix == 0:
        return changed
    if not has_backward_work(chunk, prefix):
        changed[schedule.BackwardPass] = lambda _: _skip_backward
        changed[schedule.RecvGrad] = lambda _: _nothing
    if prefix >= chunk.start:
        changed[schedule.SendGrad] = lambda _: _free_input
        changed[schedule.RecvActivation] = _without_gradient
        changed[schedule.LoadMicroBatch] = _without_gradient
    return changed


def _nothing(engine: Any, buffer_id: int) -> None:
    """Receive nothing: the successor sends no gradient."""


def _skip_backward(engine: Any, buffer_id: int) -> None:
    buffers.free_outputs(engine, buffer_id)


def _free_input(engine: Any, buffer_id: int) -> None:
    buffers.free_inputs(engine, buffer_id)


def _without_gradient(receive: Instruction) -> Instruction:
    def instruction(engine: Any, buffer_id: int) -> None:
        receive(engine, buffer_id=buffer_id)
        inputs = buffers.inputs_of(engine, buffer_id)
        for tensor in inputs if isinstance(inputs, tuple) else (inputs,):
            if isinstance(tensor, torch.Tensor):
                tensor.requires_grad_(False)

    return instruction
