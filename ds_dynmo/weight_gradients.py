"""Functions for kernels that hide weights from autograd and defer their gradients.

The engine's schedule decides which gradients are deferred (:mod:`ds_dynmo.engine.run.weight_gradients`). Without an
engine none is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ds_dynmo.torch_private import transforms_are_active

Compute = Callable[[], torch.Tensor]
RowIndex = int | None  # of a row of a parameter; None: the whole parameter


class Collector(Protocol):
    """Collects deferred gradients.

    Attributes:
        defers: whether the running pass defers weight gradients.
    """

    defers: bool

    def hide_from_autograd(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Hide ``parameters`` from autograd in their present use if this pass defers them; return whether it does."""

    def add(self, parameter: nn.Parameter, compute: Compute, *, row: RowIndex = None, held_bytes: int = 0) -> bool:
        """Keep ``compute`` if a backward pass in two parts runs; return whether it is kept."""

    def add_seen(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Keep a gradient of autograd's if others of ``parameter`` are kept; return whether it is."""


_collector: Collector | None = None


@contextmanager
def collected_by(collector: Collector) -> Iterator[None]:
    """Defer gradients to ``collector`` inside."""
    global _collector
    outer, _collector = _collector, collector
    try:
        yield
    finally:
        _collector = outer


def is_split() -> bool:
    """Return whether the backward pass of the running forward pass is in two parts."""
    return (
        not torch.compiler.is_compiling()  # first, so that compiled code does not depend on the others
        and _collector is not None
        and _collector.defers
        and torch.is_grad_enabled()
        and not transforms_are_active()
    )


def waits(*weights: Any) -> bool:
    """Return whether the gradients of ``weights`` are deferred, for their use in the running forward pass.

    If so, hide the weights from autograd, and call :func:`defer_weight_gradient` in the backward pass. Else let
    autograd see all of them.
    """
    if not is_split() or _collector is None:
        return False
    if not all(type(weight) is nn.Parameter and weight.requires_grad for weight in weights):
        return False
    return not torch.is_autocast_enabled(weights[0].device.type) and _collector.hide_from_autograd(weights)


def defer_weight_gradient(parameter: nn.Parameter, compute: Compute, *, held_bytes: int = 0) -> None:
    """Compute the gradient of a parameter later, when the pipeline schedule has time for it.

    Call it in ``backward`` of a ``torch.autograd.Function`` that hides ``parameter`` from autograd, for example in a
    tuple, and returns no gradient for it. ``compute()`` returns the gradient in the parameter's shape; it is added to
    ``parameter.grad``, and all hooks of the parameter see it. If the backward pass is not split, or without an engine
    of ds_dynmo, this happens at once.

    Args:
        parameter: a leaf that requires a gradient.
        compute: called once; its inputs are held until then.
        held_bytes: of these inputs, for the memory limit of the schedule; count inputs that several calls share once.
    """
    defer_row(parameter, None, compute, held_bytes=held_bytes)


def defer_row(parameter: nn.Parameter, row: RowIndex, compute: Compute, *, held_bytes: int = 0) -> None:
    """Defer the gradient of ``parameter[row]`` like :func:`defer_weight_gradient`; other rows have zeros."""
    if _collector is None or not _collector.add(parameter, compute, row=row, held_bytes=held_bytes):
        gradient = whole(parameter, row, compute())
        with torch.enable_grad():
            parameter.backward(gradient)


def defer_seen(parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
    """Defer a gradient that autograd has computed if others of ``parameter`` are deferred; return whether it is."""
    return _collector is not None and _collector.add_seen(parameter, gradient)


def whole(parameter: nn.Parameter, row: RowIndex, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``parameter[row]`` as one of ``parameter``, with zeros elsewhere."""
    if row is None:
        return gradient
    among_zeros = gradient.new_zeros(parameter.shape)
    among_zeros[row] = gradient
    return among_zeros
