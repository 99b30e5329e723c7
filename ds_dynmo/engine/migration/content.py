"""What a layer consists of: its module, and what belongs to its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.deepspeed_adapter.flat_wrapper import bound_by_wrapper
from ds_dynmo.engine.serialization.description import can_be_sent, why_it_stays

_HOOKS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}  # torch's methods, and where it keeps what they register (private, read in torch 2.13.0)


@dataclass
class LayerContent:
    """What a layer consists of.

    Attributes:
        module: the layer, or its :class:`Dismantled` parts, or None for a plain function.
        parameters: the layer's parameters, each once.
        groups: per parameter, its index among the optimizer's parameter groups; None if it is in none.
        optimizer_state: per parameter, the optimizer's state for it; None if it has none.
        gradients: per parameter, a gradient that is held; usually None at a batch boundary.
        attributes: per parameter, what was set on it (``ds_pipe_replicated``, a user's own marks).
        hooks: per parameter, the user's hooks on it, by the method that registers them.
        group_options: options of the groups above, as they are now.
    """

    module: Any
    parameters: list[nn.Parameter]
    groups: list[int | None]
    optimizer_state: list[dict[Any, Any] | None]
    gradients: list[torch.Tensor | None]
    attributes: list[dict[str, Any]]
    hooks: list[dict[str, list[Any]]]
    group_options: dict[int, dict[str, Any]] = field(default_factory=dict)


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
        method: [hook for hook in (getattr(parameter, held) or {}).values() if not _is_deepspeeds(hook)]
        for method, held in _HOOKS.items()
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
