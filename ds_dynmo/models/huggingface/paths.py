"""Where the layers of a pipeline are in transformers' model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ds_dynmo.models.huggingface.adapter import source_of
from ds_dynmo.models.huggingface.configs import name_of
from ds_dynmo.models.huggingface.verification import find_halves
from ds_dynmo.models.huggingface.vocabulary import slices_of
from ds_dynmo.models.slice_counts import Slices

__all__ = ["paths_of_layers"]


def paths_of_layers(
    model: Any, *, peft: Any = None, vocabulary_slices: Slices = None, split_blocks: bool = False, untie: bool = False
) -> tuple[Any, list[str]]:
    """Build transformers' model without memory, with its adapters, and find the layers of a pipeline in it.

    Args:
        model, peft, vocabulary_slices, split_blocks, untie: what :func:`~ds_dynmo.models.huggingface.layers` made them
            of.

    Returns:
        The model, and the path of each layer's part in it.
    """
    source = source_of(model, seed=0, weights=False, peft=peft, untie=untie)
    source = replace(source, slices=slices_of(source, vocabulary_slices, name_of(model)))
    source = find_halves(source, name_of(model)) if split_blocks else source
    whole = source.skeleton if source.adapters is None else source.adapters.model.get_base_model()
    return whole, [path for layer, path in enumerate(source.outline.paths) for _ in source.places(layer)]
