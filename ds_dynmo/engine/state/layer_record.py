"""A layer as a record: its module, and the state that belongs to its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.deepspeed.flat_adapter import is_of_wrapper, marks_of, place_of_hook
from ds_dynmo.engine.move.description import can_be_sent, why_it_stays
from ds_dynmo.torch_private import HOOKS_OF_PARAMETERS, hooks_of


@dataclass
class ParameterRecord:
    """A parameter of a layer, and the state that belongs to it.

    Attributes:
        group: number of its parameter group; None: it is in none.
        state: its optimizer state, if that travels inside the layer; None: it has none.
        gradient: its gradient; usually None between batches.
        attributes: attributes set on it (``ds_pipe_replicated``, or by users).
        hooks: the user's hooks on it, by the method that registers them.
    """

    parameter: nn.Parameter
    group: int | None
    state: dict[Any, Any] | None
    gradient: torch.Tensor | None
    attributes: dict[str, Any]
    hooks: dict[str, list[Any]]


@dataclass
class LayerRecord:
    """A layer with all state that belongs to it.

    Attributes:
        module: the layer, or its :class:`Dismantled` parts.
        parameters: by name, each once.
        group_options: present options of the parameters' groups.
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
        """Collect a layer with all state that belongs to it.

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


def without_gradients(layer: LayerRecord) -> LayerRecord:
    """Return the record of a layer with None for each gradient, as between two batches."""
    parameters = {name: replace(record, gradient=None) for name, record in layer.parameters.items()}
    return replace(layer, parameters=parameters)


def parameter_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """Collect the attributes set on a parameter that can travel."""
    return {name: value for name, value in marks_of(parameter).items() if can_be_sent(value)}


def parameter_hooks(parameter: nn.Parameter) -> dict[str, list[Any]]:
    """Collect the user's hooks on a parameter, as :func:`user_hooks` does. DeepSpeed registers its hooks again.

    Raises:
        TypeError: a hook cannot be pickled: it would be lost.
    """
    hooks = user_hooks(parameter)
    for hook in (hook for registered in hooks.values() for hook in registered):
        reason = why_it_stays(hook)
        if reason is not None:
            raise TypeError(
                f"a parameter of shape {list(parameter.shape)} has the hook {hook!r}, which cannot be pickled and "
                f"would be lost: use a function of a Python module, or a method of the layer ({reason})"
            )
    return hooks


def user_hooks(parameter: nn.Parameter) -> dict[str, list[Any]]:
    """Collect the user's hooks on a parameter, by the method that registers them; they may fail to be pickled.

    The place among them that DeepSpeed's hook has is marked by :func:`place_of_hook`.
    """
    hooks = {method: hooks_of(parameter, method) for method in HOOKS_OF_PARAMETERS}
    return {
        method: [place_of_hook if is_of_wrapper(hook) else hook for hook in registered]
        for method, registered in hooks.items()
        if not all(map(is_of_wrapper, registered))
    }


def take_over(parameter: nn.Parameter, old: nn.Parameter) -> None:
    """Copy the attributes and hooks that users set on ``old`` to a parameter that replaces it."""
    vars(parameter).update(marks_of(old))
    register_hooks(parameter, user_hooks(old))


def register_hooks(parameter: nn.Parameter, hooks: dict[str, list[Any]]) -> None:
    """Register the hooks from :func:`parameter_hooks` on a parameter that replaces the old one."""
    if not any(hooks.values()):  # one of integers can have none
        return
    trains = parameter.requires_grad
    parameter.requires_grad = True  # torch refuses hooks on a frozen parameter, but keeps earlier ones
    for method, functions in hooks.items():
        for function in functions:
            getattr(torch.Tensor, method)(parameter, function)
    parameter.requires_grad = trains
