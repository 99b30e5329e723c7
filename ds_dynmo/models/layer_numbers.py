"""Find layers by their numbers in the model's layer list: the blocks, and those that a rank holds now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.module import layer_specs, layers_of_stage, modules_of
from ds_dynmo.errors import ConfigError

__all__ = ["block_numbers", "local_layers", "tie_of", "whole_layers"]


def block_numbers(layers: Sequence[LayerSpec]) -> range:
    """Return the layer numbers from the first block to the last: layers whose class has a true ``is_block``.

    There may be any number of layers before them (an embedding, learned positions) and after them (norm, head).

    Raises:
        ConfigError: no layer is a block.
    """
    numbers = [number for number, spec in enumerate(layers) if getattr(spec.typename, "is_block", False)]
    if not numbers:
        raise ConfigError(f"none of the model's {len(layers)} layers is a block: no class has is_block = True")
    return range(numbers[0], numbers[-1] + 1)


def whole_layers(layers: Sequence[LayerSpec], layers_per_block: int) -> list[int]:
    """Return where the layers of the undivided model begin in ``layers``, and where the last one ends.

    Slices of the embedding are one layer of it, those of the head another one, and so are the halves of a block.

    Args:
        layers_per_block: 2 if a block's halves are layers, else 1.
    """
    blocks = block_numbers(layers)
    sliced = [getattr(spec.typename, "takes_labels", False) for spec in layers]
    halves = {number for number in blocks if (number - blocks.start) % layers_per_block}
    slices = {number for number in range(1, len(layers)) if sliced[number - 1] and sliced[number]}
    return [number for number in range(len(layers) + 1) if number not in halves | slices]


def tie_of(module: PipelineModule, layer: int) -> str | None:
    """Return the key by which layer ``layer`` of the model is tied to others; None: it is not."""
    spec = layer_specs(module)[layer]
    return spec.key if isinstance(spec, TiedLayerSpec) else None


def local_layers(module: PipelineModule) -> Iterator[tuple[int, nn.Module]]:
    """Iterate over ``(layer number, layer)`` of this stage's modules, as ``engine.layers()`` has them."""
    return modules_of(module, layers_of_stage(module))
