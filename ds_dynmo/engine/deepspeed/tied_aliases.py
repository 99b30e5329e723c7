"""Several uses of a tied layer on one stage: one module's memory, and gradients of each use's own.

The first use on a stage owns the parameters. Every later use runs a *tied alias*, a copy of the module that shares the
memory of its parameters and buffers. So the gradient of each use is summed over the micro-batches before the uses are
added up, on one stage as on two, and numbers do not change when uses meet or part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.move.object_graph import copy_of_modules


class TiedAliases:
    """The tied aliases of one stage, by their layers' numbers."""

    def __init__(self) -> None:
        self._owners: dict[int, nn.Module] = {}
        self._aliases: dict[int, nn.Module] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._aliases)

    @property
    def by_layer(self) -> Mapping[int, nn.Module]:
        """The alias of each later use."""
        return self._aliases

    @property
    def modules(self) -> list[nn.Module]:
        return list(self._aliases.values())

    def replace(self, owners: Mapping[int, nn.Module]) -> Mapping[int, nn.Module]:
        """Make an alias for each layer in place of those that were there.

        Args:
            owners: by layer, the module of the first use on the stage.
        """
        self._owners = dict(owners)
        self._aliases = {index: _alias_of(module) for index, module in owners.items()}
        self._sums = {}
        return self._aliases

    def refresh(self, *, training: bool) -> None:
        """Point the aliases at the parameters' present memory, and put them in training or evaluation mode."""
        for alias in self.modules:
            alias.train(training)
        for parameter, own in self._pairs():
            own.data = parameter.data
            own.requires_grad_(parameter.requires_grad)

    # -- gradients ------------------------------------------------------------------------------------

    def add_gradients(self) -> None:
        """Add the gradients of later uses to those of the first, in layer order."""
        for parameter, own in self._pairs():
            if own.grad is not None:
                parameter.grad = own.grad if parameter.grad is None else parameter.grad + own.grad
                own.grad = None

    def accumulate_gradients(self, dtype: torch.dtype) -> None:
        """Add the aliases' gradients of a micro-batch to separate sums, as BF16_Optimizer does."""
        for _, own in self._pairs():
            if own.grad is not None:
                if id(own) not in self._sums:
                    self._sums[id(own)] = torch.zeros_like(own, dtype=dtype, requires_grad=False)
                self._sums[id(own)].add_(own.grad.to(dtype))
                own.grad = None

    def add_accumulated(self) -> None:
        """Add the sums of later uses to what BF16_Optimizer has accumulated for the first, in layer order."""
        for parameter, own in self._pairs():
            total = self._sums.pop(id(own), None)
            if total is not None:
                buffer = parameter._hp_grad  # type: ignore[attr-defined]
                buffer.add_(total.view(buffer.shape))

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Pair each parameter of a first use with that of a later use."""
        for index, alias in self._aliases.items():
            yield from zip(self._owners[index].parameters(), alias.parameters())


def _alias_of(layer: nn.Module) -> nn.Module:
    """Copy a layer: the copy shares the memory of parameters and buffers but has gradients of its own."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in layer.buffers()}
    for parameter in layer.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    return copy_of_modules(layer, memo)
