"""Backward passes of a model in one, and in two parts, side by side."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.run.weight_gradients import WeightGradients

WIDTH = 16
Passes = list[tuple[torch.Tensor, torch.Tensor]]


def mlp(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH, bias), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH, bias))


def inputs(*shape: int, dtype: torch.dtype = torch.float32, count: int = 3) -> Passes:
    """Inputs and the gradients of outputs, of some micro-batches."""
    generator = torch.Generator().manual_seed(len(shape))
    return [
        (torch.randn(*shape, generator=generator).to(dtype), torch.randn(*shape, generator=generator).to(dtype))
        for _ in range(count)
    ]


def in_one(model: nn.Module, passes: Passes) -> list[Any]:
    found = []
    for input, gradient in passes:
        entering = input.detach().requires_grad_()
        output = model(entering)
        output.backward(gradient)
        found.append((output.detach(), entering.grad))
    return found


def in_two(model: nn.Module, passes: Passes, lag: int = 1) -> tuple[list[Any], set[str]]:
    """The second part of each pass comes after the first part of the ``lag`` next ones; names of what was deferred."""
    gradients, found = WeightGradients(), []
    with gradients.splitting(model.modules()):
        for number, (input, gradient) in enumerate(passes):
            entering = input.detach().requires_grad_()
            with gradients.forward_pass(split=True):
                output = model(entering)
            with gradients.first_part((0, number)):
                output.backward(gradient)
            found.append((output.detach(), entering.grad))
            if number >= lag:
                finish(gradients, number - lag)
        for number in range(max(0, len(passes) - lag), len(passes)):
            finish(gradients, number)
        return found, {name for name, parameter in model.named_parameters() if parameter in gradients.hidden}


def finish(gradients: WeightGradients, micro_batch: int = 0) -> None:
    for root in gradients.second_part((0, micro_batch)).roots():
        root.backward()


def check_same(model: nn.Module, passes: Passes, lag: int = 1, other: nn.Module | None = None) -> set[str]:
    """Both give the same bits; names of the weights that were deferred. ``other``: the same model, else a copy."""
    other = other or copy.deepcopy(model)
    expected, (found, deferred) = in_one(model, passes), in_two(other, passes, lag)
    for one, two in zip(expected, found, strict=True):
        assert all(same_bits(a, b) for a, b in zip(one, two, strict=True))
    check_same_gradients(model, other)
    return deferred


def check_same_gradients(model: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert same_bits(a.grad, b.grad), name


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Zeros have signs."""
    if a is None or b is None:
        return a is b
    if a.is_complex():
        return same_bits(torch.view_as_real(a), torch.view_as_real(b))
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())
