"""Layers of a pipeline whose linear layers can be pruned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ds_dynmo.models.pruning.sparse_linear import PrunableLinear

__all__ = ["PrunableLayer", "prunable_linears"]


class PrunableLayer(nn.Module):
    """Mixin before the class of a layer: replaces its linear layers by prunable ones, which have their parameters."""

    def __init__(self, *args: Any, csr_from: float | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        kinds = self.prunable_kinds()
        for parent in list(self.modules()):
            for name, part in list(parent.named_children()):
                if type(part) in kinds:
                    parameters: Any = part
                    setattr(parent, name, kinds[type(part)](parameters.weight, csr_from, parameters.bias))

    @classmethod
    def prunable_kinds(cls) -> Mapping[type[nn.Module], type[PrunableLinear]]:
        """Map the classes of linear layers to what takes their place."""
        return {nn.Linear: PrunableLinear}

    @property
    def compiled_parts(self) -> tuple[str, ...]:
        """What the layer compiles, as long as its products are dense: torch traces no sparse ones."""
        if any(linear.index is not None for linear in prunable_linears(self)):
            return ()
        parts: tuple[str, ...] = super().compiled_parts  # type: ignore[misc]  # of the class behind this
        return parts

    @property
    def share_kept(self) -> float:
        """The share of the layer's prunable weights that is not pruned; 1.0 if it has none."""
        linears = prunable_linears(self)
        return sum(linear.kept for linear in linears) / sum(linear.size for linear in linears) if linears else 1.0

    def workspace_bytes(self) -> int:
        """Count the bytes of the largest dense weight that a pass makes of kept values, and frees again."""
        return max((linear.workspace_bytes for linear in prunable_linears(self)), default=0)


def prunable_linears(layer: nn.Module) -> list[PrunableLinear]:
    """List the prunable linear layers of a layer, in the order of their weights' positions in it."""
    return [part for part in layer.modules() if isinstance(part, PrunableLinear)]
