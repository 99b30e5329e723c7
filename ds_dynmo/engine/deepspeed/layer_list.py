"""The layer list of a model: what the user gave for each layer, and which layers are tied. The same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe.module import LayerSpec
from torch import nn

from ds_dynmo.placement import Placement


class LayerList:
    """The layers of a model by their number, wherever they are.

    Args:
        specs: what the user gave for each layer: a LayerSpec, a module or a function.
    """

    def __init__(self, specs: Sequence[Any]) -> None:
        self._specs = specs

    @property
    def num_layers(self) -> int:
        return len(self._specs)

    def spec(self, index: int) -> Any:
        """Return what the user gave for layer ``index``: a LayerSpec, a module or a function."""
        return self._specs[index]

    # -- tied layers ----------------------------------------------------------------------------------

    def key(self, index: int) -> str | None:
        """Return the key of a tied layer; None for any other layer."""
        spec = self.spec(index)
        return str(spec.key) if isinstance(spec, TiedLayerSpec) else None

    def tied_keys(self) -> list[str]:
        """List the keys of all tied layers of the model."""
        return sorted({key for index in range(self.num_layers) if (key := self.key(index)) is not None})

    def uses(self, key: str) -> list[int]:
        """List the layers of the whole model that share the parameters of ``key``."""
        return [index for index in range(self.num_layers) if self.key(index) == key]

    def first_use(self, index: int) -> int:
        """Return the layer that names the parameters of layer ``index``: the first use of a tied one, else itself."""
        key = self.key(index)
        return index if key is None else self.uses(key)[0]

    def first_uses(self) -> list[int | None]:
        """List :meth:`first_use` of every layer; None for a function."""
        modules = [isinstance(self.spec(index), nn.Module | LayerSpec) for index in range(self.num_layers)]
        return [self.first_use(index) if is_module else None for index, is_module in enumerate(modules)]

    def stored_use(self, index: int) -> int | None:
        """Return the first use that DeepSpeed writes a file of; None if every use has a function around it."""
        if (key := self.key(index)) is None:
            return index
        return next((use for use in self.uses(key) if self.spec(use).forward_fn is None), None)

    def main_use(self, index: int) -> int:
        """Return the use that may train the whole module: the first without a ``forward_fn``, or the first."""
        stored = self.stored_use(index)
        return self.first_use(index) if stored is None else stored

    # -- parameters of a stage ------------------------------------------------------------------------

    def owner(self, index: int, placement: Placement) -> bool:
        """Return whether layer ``index`` owns its module: a tied layer does not if an earlier use is on its stage."""
        key = self.key(index)
        if key is None:
            return True
        here = placement.layers_of(placement.stage_of(index))
        return index == min(use for use in self.uses(key) if use in here)

    def first_uses_at(self, placement: Placement, stage: int) -> list[int]:
        """List the layers that name a stage's parameters, in the order of DeepSpeed's module."""
        here = placement.layers_of(stage)
        owners = [index for index in here if self.owner(index, placement)]
        return [self.first_use(index) for index in self._in_order(owners)]

    def _in_order(self, indices: Iterable[int]) -> list[int]:
        """Sort layers of a stage as DeepSpeed's module has their parameters: tied ones first."""
        return sorted(indices, key=lambda index: (self.key(index) is None, index))
