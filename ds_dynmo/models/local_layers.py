"""The layers that a rank's ``PipelineModule`` holds now, by their numbers in the model's layer list."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from deepspeed.pipe import PipelineModule
from torch import nn

__all__ = ["local_layers"]


def local_layers(module: PipelineModule) -> Iterator[tuple[int, nn.Module]]:
    """``(layer number, layer)`` for each layer of this stage that is a module, plain functions left out.

    A tied layer with a ``forward_fn``, which DeepSpeed keeps as a partial, comes as the module it is tied to:
    a stage that holds several layers of a tie yields that module several times.
    """
    for layer_number, layer in enumerate(module.forward_funcs, start=module._local_start):
        if isinstance(layer, partial) and layer.args and isinstance(layer.args[0], nn.Module):
            yield layer_number, layer.args[0]
        elif isinstance(layer, nn.Module):
            yield layer_number, layer
