"""Gradient clipping by a norm that does not depend on the partition.

DeepSpeed 0.19.8 counts the first stage only in fp32 (its "model parallel rank" includes the stage,
runtime/utils.py:394), so what is clipped depends on where layers are. Here every layer counts, once: squares are
summed per layer on the rank that owns it, and the layers' sums are added in layer order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn


def gradient_norm(
    layers: Mapping[int, nn.Module],
    num_layers: int,
    sum_over_stages: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> float:
    """The 2-norm of the gradients of the whole model, already averaged over replicas; the same on every rank.

    Args:
        layers: this stage's layers by number. A tied layer is here only on the stage of its first use.
        sum_over_stages: collective; the elementwise sum over the pipeline's stages (zeros but for one
            stage in every place, so that it is exact).
    """
    squares = torch.zeros(num_layers, dtype=torch.float64, device=device)
    for index, layer in layers.items():
        gradients = _gradients(layer.parameters())
        if gradients:
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
            squares[index] = norms.square().sum()
    return float(sum_over_stages(squares).sum().sqrt())


def scale_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Multiply the gradients by ``max_norm / norm`` where that is below 1."""
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0:
        for gradient in _gradients(parameters):
            gradient.mul_(factor)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
