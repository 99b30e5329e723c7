"""Several uses of a tied layer on one stage: they share one module's memory and have separate gradients.

The first use on a stage owns the parameters. Every later use runs a *tied alias*, a copy of the module that shares the
memory of its parameters and buffers. So the gradient of each use is summed over the micro-batches before the uses are
added up, on one stage as on two: results do not change when a move puts uses on one stage or on two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.deepspeed.flat_adapter import marks_of
from ds_dynmo.engine.move.object_graph import copy_of_modules
from ds_dynmo.unmarked import unmarked


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

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters of the later uses, which have gradients of their own."""
        return [later for _, later in self._pairs()]

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
        """Point the aliases at the parameters' present memory, with their marks, and set the mode that they run in."""
        for alias in self.modules:
            alias.train(training)
        for parameter, later in self._pairs():
            later.data = parameter.data
            later.requires_grad = parameter.requires_grad
            vars(later).update(marks_of(parameter))

    # -- gradients ------------------------------------------------------------------------------------

    def add_gradients(self) -> None:
        """Add the gradients of later uses to those of the first, in layer order."""
        for parameter, later in self._pairs():
            if later.grad is not None:
                assert parameter.grad is not None, "zeros are set where there is no gradient"
                parameter.grad, later.grad = parameter.grad + later.grad, None

    def accumulate_gradients(self, dtype: torch.dtype) -> None:
        """Add the aliases' gradients of a micro-batch to separate sums, as BF16_Optimizer does."""
        for _, later in self._pairs():
            if later.grad is not None:
                if id(later) not in self._sums:
                    self._sums[id(later)] = torch.zeros_like(later, dtype=dtype, requires_grad=False)
                self._sums[id(later)].add_(later.grad.to(dtype))
                later.grad = None

    def add_accumulated(self) -> None:
        """Add the sums of later uses to what BF16_Optimizer has accumulated for the first, in layer order."""
        for parameter, later in self._pairs():
            total = self._sums.pop(id(later), None)
            if total is not None:
                buffer = parameter._hp_grad  # type: ignore[attr-defined]
                buffer.add_(total.view(buffer.shape))

    def gradient_of(self, parameter: nn.Parameter, attribute: str) -> torch.Tensor | None:
        """Return the sum of a parameter's gradients, of an alias or of a layer, which has it in ``attribute``."""
        held: torch.Tensor | None = getattr(parameter, attribute, parameter.grad)
        return self._sums.get(id(parameter), held)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Pair each parameter of a first use with that of a later use."""
        for index, alias in self._aliases.items():
            yield from zip(self._owners[index].parameters(), alias.parameters())


def _alias_of(layer: nn.Module) -> nn.Module:
    """Copy a layer: the copy shares the memory of parameters and buffers but has separate gradients."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in layer.buffers()}
    for parameter in layer.parameters():
        memo[id(parameter)] = nn.Parameter(unmarked(parameter), requires_grad=parameter.requires_grad)
    return copy_of_modules(layer, memo)
