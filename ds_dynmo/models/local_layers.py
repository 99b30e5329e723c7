"""The layers that a rank's ``PipelineModule`` holds now, by their numbers in the model's layer list."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

__all__ = ["local_layers", "tie_of"]


def tie_of(module: PipelineModule, layer: int) -> str | None:
    """The key by which layer ``layer`` of the model is tied to others, None if it is not."""
    spec = module._layer_specs[layer]
    return spec.key if isinstance(spec, TiedLayerSpec) else None


def local_layers(module: PipelineModule) -> Iterator[tuple[int, nn.Module]]:
    """``(layer number, layer)`` for each layer of this stage that is a module; plain functions are left out.

    Every use of a tied layer comes as the one module that the stage holds for all of them.
    """
    for layer in range(module._local_start, module._local_stop):
        key = tie_of(module, layer)
        if key is not None:
            yield layer, module.tied_modules[key]
        elif str(layer) in module._modules:
            yield layer, module._modules[str(layer)]
