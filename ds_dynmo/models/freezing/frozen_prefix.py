"""Freeze a prefix of a model, as far as it is on this stage, whatever decides how many layers it has."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import PipelineModule

from ds_dynmo.models.case import DynamicCase, RunSizes
from ds_dynmo.models.layer_numbers import local_layers, tie_of

__all__ = ["FreezingCase", "freeze_prefix", "set_frozen_prefix"]


def set_frozen_prefix(module: PipelineModule, num_frozen: int) -> bool:
    """Freeze the model's first ``num_frozen`` layers and unfreeze all others, as far as they are on this stage.

    A tie with one layer in the prefix is frozen on every stage. The engine has to be told by ``model_changed``.

    Returns:
        Whether this changed any parameter of this stage.
    """
    changed = False
    frozen_ties = {tie_of(module, layer) for layer in range(num_frozen)} - {None}
    for layer_number, layer in local_layers(module):
        frozen = layer_number < num_frozen or tie_of(module, layer_number) in frozen_ties
        for parameter in layer.parameters():
            changed |= parameter.requires_grad == frozen
            parameter.requires_grad_(not frozen)
            if frozen:
                parameter.grad = None
    return changed


class FreezingCase(DynamicCase):
    """Freezes before each batch as many layers as a subclass decides."""

    name = "freezing"

    def __init__(self, engine: Any, sizes: RunSizes) -> None:
        super().__init__(engine)
        self._block_numbers = sizes.blocks
        self._frozen: int | None = None  # layers that were loaded may be frozen or not

    def _freeze(self, num_frozen: int) -> None:
        """Freeze so many layers in the next batch. Collective where the number changes."""
        if num_frozen != self._frozen:
            freeze_prefix(self.engine, num_frozen)
            self._frozen = num_frozen

    def _loaded(self) -> None:
        """Forget the number of frozen layers after a load: before the next batch all ranks freeze anew."""
        self._frozen = None


def freeze_prefix(engine: Any, num_frozen: int) -> None:
    """Call :func:`set_frozen_prefix` on all stages, and tell the engine if that changed any. Collective."""
    changed = set_frozen_prefix(engine.module, num_frozen)
    if engine.sum_over_stages(torch.tensor([float(changed)], dtype=torch.float64)).item():
        engine.model_changed(f"freezing: first {num_frozen} layers")
