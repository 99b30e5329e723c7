"""Gradient clipping by a norm that does not depend on the partition.

In fp32, DeepSpeed 0.19.8 counts the first stage only (its "model parallel rank" includes the stage,
runtime/utils.py:394), so its norm depends on the partition. Here every layer counts once: squares are summed per layer
on the rank that owns it, and every rank adds the layers' sums in layer order. DeepSpeed clips at 1.0 unless
"gradient_clipping" is 0.0, so runs without this key differ from stock DeepSpeed's too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.comm.replicas import is_per_replica
from ds_dynmo.engine.deepspeed.module import is_split
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.torch_private import norms_of

GradientOf = Callable[[nn.Parameter], torch.Tensor | None]
Gradients = Iterable[tuple[nn.Parameter, torch.Tensor]]


def gradient_norm(
    layers: Mapping[int, nn.Module],
    num_layers: int,
    location: RankCoordinates,
    sum_over_all: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
    gradient_of: GradientOf,
) -> torch.Tensor:
    """Take the 2-norm of the whole model's gradients, already averaged over replicas; the same on every rank.

    This does not wait for the accelerator.

    Args:
        layers: this stage's layers by number; a tied layer only on the stage of its first use.
        location: this rank's coordinates among the ranks with its layers.
        sum_over_all: collective; the elementwise sum over stages and ranks. It is exact, as each element is zero on all
            ranks except one.
        gradient_of: returns the gradient of a parameter, or None.

    Returns:
        fp64 ``[]`` on ``device``.
    """
    squares = torch.zeros(num_layers, location.tp_size, location.replicas, dtype=torch.float64, device=device)
    for index, layer in layers.items():
        counted = [p for p in layer.parameters() if counts(p, location)]
        gradients = [_elements(gradient).float() for p in counted if (gradient := gradient_of(p)) is not None]
        if gradients:
            norms = torch.stack([norm.double() for norm in norms_of(gradients)])
            squares[index, location.tp_rank, location.replica] = norms.square().sum()
    return sum_over_all(squares).sum().sqrt()


def gradient_magnitudes(
    layers: Mapping[int, nn.Module],
    num_layers: int,
    location: RankCoordinates,
    device: torch.device,
    gradient_of: GradientOf,
) -> torch.Tensor:
    """Sum the magnitudes of the gradients that this rank counts, per layer: fp64 ``[num_layers]`` on ``device``.

    Args:
        layers: of this stage, by number.
        location: this rank's coordinates among the ranks with its layers.
        gradient_of: returns the gradient of a parameter or this rank's part of it, or None.
    """
    sums = torch.zeros(num_layers, dtype=torch.float64, device=device)
    for index, layer in layers.items():
        gradients = [gradient_of(parameter) for parameter in layer.parameters() if counts(parameter, location)]
        norms = [
            torch.linalg.vector_norm(_elements(gradient), ord=1, dtype=torch.float64)
            for gradient in gradients
            if gradient is not None
        ]
        if norms:
            sums[index] = torch.stack(norms).sum()
    return sums


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient; a sparse one (``nn.Embedding(sparse=True)``) is coalesced first."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def counts(parameter: nn.Parameter, location: RankCoordinates) -> bool:
    """Return whether a parameter counts here: each part of a split one, others on the first slice and replica only."""
    on_this_slice = location.tp_rank == 0 or is_split(parameter)
    return on_this_slice and (location.replica == 0 or is_per_replica(parameter))


def sharded_norm(
    gradients: Iterable[torch.Tensor], sum_over_world: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Take the 2-norm of gradients of which every rank holds a part, rounded to fp32; the same on every rank.

    The parts, and so the order of summation, depend on the partition. Squares are summed in fp64, whose rounding
    changes the fp32 result about once in ten million steps. This does not wait for the accelerator.

    Returns:
        fp32 ``[]`` on ``device``.
    """
    squares = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in gradients]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    return sum_over_world(total).sqrt().float()


class ModelNorm:
    """The norm of all gradients of the model, in each form in which an optimizer holds them.

    Args:
        replicas_differ: whether the model has parameters that differ between replicas.
    """

    def __init__(self, layers: StageLayers, comm: Communicator, *, replicas_differ: bool) -> None:
        self._layers, self._comm, self._replicas_differ = layers, comm, replicas_differ

    @property
    def coordinates(self) -> RankCoordinates:
        """This rank's coordinates among the ranks with its layers, if all replicas hold the same."""
        return replace(self._comm.here, replica=0, replicas=1)

    @property
    def replica_coordinates(self) -> RankCoordinates:
        """This rank's coordinates among the ranks with its layers, if parameters may differ between replicas."""
        return self._comm.here

    def of(self, gradient_of: GradientOf) -> torch.Tensor:
        """Take the norm of the parameters' gradients, averaged over the replicas. Collective."""
        modules, count, location = self._layers.counted_modules(), self._layers.num_layers, self.coordinates
        sum_over_all = self._comm.sum_over_model
        if self._replicas_differ:
            location = self.replica_coordinates
            sum_over_all = self._comm.sum_over_world
        return gradient_norm(modules, count, location, sum_over_all, self._comm.device, gradient_of)

    def of_sums(self, gradients: Gradients) -> torch.Tensor:
        """Take the norm of the sums of gradients that ``BF16_Optimizer`` keeps. Collective."""
        gradient_of = {id(parameter): gradient for parameter, gradient in gradients}
        return self.of(lambda parameter: gradient_of.get(id(parameter)))

    def of_shards(self, gradients: Gradients) -> torch.Tensor:
        """Take the norm of gradients of which every replica holds a part (ZeRO). Collective."""
        modules, location = self._layers.counted_modules().values(), self.coordinates
        counted = {id(p) for module in modules for p in module.parameters() if counts(p, location)}
        held = [gradient for p, gradient in gradients if id(p) in counted]
        return sharded_norm(held, self._comm.sum_over_world, self._comm.device)


def scale_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Multiply the gradients by ``min(1, max_norm / norm)``, without waiting for ``norm``."""
    factor = torch.full_like(norm, max_norm) / (norm + 1e-6)  # a number over a tensor would be rounded twice
    factor.masked_fill_(~(factor < 1.0), 1.0)
    for gradient in [p.grad for p in parameters if p.grad is not None]:
        gradient.mul_(factor)
