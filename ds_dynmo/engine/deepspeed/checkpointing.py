"""DeepSpeed's activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import nn

from ds_dynmo.errors import ConfigError

TRACKER = "_CUDA_RNG_STATE_TRACKER"  # the global of Megatron's modules and of DeepSpeed's that holds their tracker


def deepspeeds_tracker() -> Any:
    """Return DeepSpeed's tracker of the named random states that layers fork, like Megatron's."""
    return ds_checkpointing.get_cuda_rng_tracker()


def checkpointing_mpu() -> Any:
    """Return the ``mpu`` that activation checkpointing was configured with; None if there is none."""
    return ds_checkpointing.mpu


def is_reentrant(module: Any) -> bool:
    """Return whether a PipelineModule uses reentrant activation checkpointing."""
    return module.activation_checkpoint_func is not ds_checkpointing.non_reentrant_checkpoint


def checkpoint_any_input(module: Any) -> None:
    """Let reentrant checkpointing of a PipelineModule work where not all inputs need a gradient.

    It loses the gradients of a segment none of whose inputs requires one (token ids, the output of a frozen prefix):
    such a segment is checkpointed the non-reentrant way. And it makes every floating output require one: by torch's
    function, not by DeepSpeed's, a mask that layers pass on too. Such an output stays the input that it is.
    """
    if is_reentrant(module):
        module.activation_checkpoint_func = any_input(module.activation_checkpoint_func)


def any_input(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``checkpoint``, a reentrant one, as :func:`checkpoint_any_input` says."""

    @wraps(checkpoint)
    def of_any_input(function: Callable[..., Any], *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return checkpoint(function, *inputs)
        without = {place for place, x in enumerate(inputs) if not (isinstance(x, torch.Tensor) and x.requires_grad)}
        if len(without) == len(inputs):
            return ds_checkpointing.non_reentrant_checkpoint(function, *inputs)
        passed_on: dict[int, int] = {}  # output: the input that it is

        def noted(*given: Any) -> Any:
            outputs = function(*given)
            for number, output in enumerate(_in_tuple(outputs)):
                _check_is_no_weight(number, output)
                passed_on.update((number, place) for place in without if output is given[place])
            return outputs

        outputs = checkpoint(noted, *inputs)
        if not passed_on:
            return outputs
        restored = tuple(
            inputs[passed_on[number]] if number in passed_on else output
            for number, output in enumerate(_in_tuple(outputs))
        )
        return restored if isinstance(outputs, tuple) else restored[0]

    return of_any_input


def _check_is_no_weight(number: int, output: Any) -> None:
    """Refuse layers that return a weight: torch makes it an output of itself, and its backward pass never ends.

    Raises:
        ConfigError: the output is a weight.
    """
    if isinstance(output, nn.Parameter):
        raise ConfigError(
            f"output {number} of checkpointed layers is a weight of shape {list(output.shape)}, which reentrant "
            "activation checkpointing cannot differentiate: return weight.view_as(weight), or set "
            '"use_reentrant": false in the "pipeline" section'
        )


def _in_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
