"""What a layer consists of: its module, and what belongs to its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.deepspeed.flat_wrapper import bound_by_wrapper
from ds_dynmo.engine.move.description import can_be_sent, why_it_stays
from ds_dynmo.torch_private import HOOKS_OF_PARAMETERS, hooks_of


@dataclass
class ParameterRecord:
    """A parameter of a layer, and what belongs to it.

    Attributes:
        group: its index among the optimizer's parameter groups; None if it is in none.
        state: the optimizer's for it, where that travels inside the layer; None if it has none.
        gradient: one that is held; usually None at a batch boundary.
        attributes: what was set on it (``ds_pipe_replicated``, a user's own marks).
        hooks: the user's on it, by the method that registers them.
    """

    parameter: nn.Parameter
    group: int | None
    state: dict[Any, Any] | None
    gradient: torch.Tensor | None
    attributes: dict[str, Any]
    hooks: dict[str, list[Any]]


@dataclass
class LayerRecord:
    """What a layer consists of.

    Attributes:
        module: the layer, or its :class:`Dismantled` parts.
        parameters: by name, each once.
        group_options: options of the parameters' groups, as they are now.
    """

    module: Any
    parameters: dict[str, ParameterRecord]
    group_options: dict[int, dict[str, Any]]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        group_of: Callable[[nn.Parameter], int | None],
        options_of: Callable[[int], dict[str, Any]],
        state_of: Callable[[nn.Parameter], dict[Any, Any] | None] = lambda parameter: None,
        gradient_of: Callable[[nn.Parameter], torch.Tensor | None] = lambda parameter: None,
    ) -> LayerRecord:
        """Collect a layer with all that belongs to it.

        Raises:
            TypeError: a hook of a parameter cannot be pickled.
        """
        parameters = {
            name: ParameterRecord(
                parameter,
                group_of(parameter),
                state_of(parameter),
                gradient_of(parameter),
                parameter_attributes(parameter),
                parameter_hooks(parameter),
            )
            for name, parameter in module.named_parameters()
        }
        groups = sorted({record.group for record in parameters.values() if record.group is not None})
        return cls(module, parameters, {number: options_of(number) for number in groups})


def parameter_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """Collect what was set on a parameter and can travel."""
    return {name: value for name, value in vars(parameter).items() if not bound_by_wrapper(name) and can_be_sent(value)}


def parameter_hooks(parameter: nn.Parameter) -> dict[str, list[Any]]:
    """Collect the user's hooks on a parameter, by the method that registers them. DeepSpeed makes its own anew.

    Raises:
        TypeError: a hook cannot be pickled: it would be lost.
    """
    found = user_hooks(parameter)
    for hook in (hook for hooks in found.values() for hook in hooks):
        reason = why_it_stays(hook)
        if reason is not None:
            raise TypeError(
                f"a parameter of shape {list(parameter.shape)} has the hook {hook!r}, which cannot be pickled and "
                f"would be lost: use a function of a Python module, or a method of the layer ({reason})"
            )
    return found


def user_hooks(parameter: nn.Parameter) -> dict[str, list[Any]]:
    """Collect the user's hooks on a parameter, also those that cannot be pickled."""
    return {
        method: [hook for hook in hooks_of(parameter, method) if not _is_deepspeeds(hook)]
        for method in HOOKS_OF_PARAMETERS
    }


def _is_deepspeeds(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")


def register_hooks(parameter: nn.Parameter, hooks: dict[str, list[Any]]) -> None:
    """Register what :func:`parameter_hooks` found on a parameter that takes another's place."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook on a frozen one, but keeps those that were there
    for method, functions in hooks.items():
        for function in functions:
            getattr(parameter, method)(function)
    parameter.requires_grad_(trains)
