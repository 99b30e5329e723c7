"""What a kernel asks before it hides a weight from autograd, and what it calls for the weight's gradient later.

The engine's schedule says which gradients wait (:mod:`ds_dynmo.engine.split.weight_gradients`). Without an engine
none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ds_dynmo.torch_private import transforms_are_active

Compute = Callable[[], torch.Tensor]
Part = int | None  # the row of a parameter that a gradient is of; None: of all


class Collector(Protocol):
    """Who keeps gradients that wait.

    Attributes:
        puts_off: does the pass that runs put its weight gradients off?
    """

    puts_off: bool

    def hides(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Say whether all ``parameters`` are hidden from autograd where they are used now."""

    def add(self, parameter: nn.Parameter, compute: Compute, *, part: Part = None, held_bytes: int = 0) -> bool:
        """Keep ``compute``, if a backward pass in two parts runs. Returns whether it does."""


_collector: Collector | None = None


@contextmanager
def collected_by(collector: Collector) -> Iterator[None]:
    """Ask ``collector`` in the meantime."""
    global _collector
    outer, _collector = _collector, collector
    try:
        yield
    finally:
        _collector = outer


def is_split() -> bool:
    """Say whether the backward pass of what runs now is in two parts."""
    return (
        not torch.compiler.is_compiling()  # first, so that compiled code does not depend on the others
        and _collector is not None
        and _collector.puts_off
        and torch.is_grad_enabled()
        and not transforms_are_active()
    )


def waits(*weights: Any) -> bool:
    """Say whether the gradients of ``weights`` will wait, for their use in the forward pass that runs.

    Then hide them from autograd, and call :func:`defer_weight_gradient` in the backward pass; else let autograd see
    all of them.
    """
    if not is_split() or _collector is None:
        return False
    if not all(type(weight) is nn.Parameter and weight.requires_grad for weight in weights):
        return False
    return not torch.is_autocast_enabled(weights[0].device.type) and _collector.hides(weights)


def defer_weight_gradient(parameter: nn.Parameter, compute: Compute, *, held_bytes: int = 0) -> None:
    """Calculate the gradient of a parameter later, where the pipeline schedule has time for it.

    Call it in ``backward`` of a ``torch.autograd.Function`` that hides ``parameter`` from autograd: it takes the
    parameter inside a tuple, say, and gives no gradient for it. ``compute()`` returns the gradient in the parameter's
    shape; it is added to ``parameter.grad``, and all hooks of the parameter see it. Where the backward pass is not
    split, and without a pipeline engine of ours, that happens at once.

    Args:
        parameter: a leaf that requires a gradient.
        compute: what it needs is held until it is called, once.
        held_bytes: of what it needs, for the memory that the schedule may take; what several calls share counts once.
    """
    defer_part(parameter, None, compute, held_bytes=held_bytes)


def defer_part(parameter: nn.Parameter, part: Part, compute: Compute, *, held_bytes: int = 0) -> None:
    """Defer the gradient of ``parameter[part]`` as :func:`defer_weight_gradient` does; the others have zeros."""
    if _collector is None or not _collector.add(parameter, compute, part=part, held_bytes=held_bytes):
        gradient = whole(parameter, part, compute())
        with torch.enable_grad():
            parameter.backward(gradient)


def whole(parameter: nn.Parameter, part: Part, gradient: torch.Tensor) -> torch.Tensor:
    """Put the gradient of ``parameter[part]`` among zeros."""
    if part is None:
        return gradient
    among_zeros = gradient.new_zeros(parameter.shape)
    among_zeros[part] = gradient
    return among_zeros
