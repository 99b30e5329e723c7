"""Which files are loaded into layers that share weights by a key and have modules of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_dynmo.engine.checkpoint.initial_model import LayerOrigin
from ds_dynmo.engine.checkpoint.layout import SliceLayout
from ds_dynmo.engine.checkpoint.optimizer_files import Saved
from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.errors import CheckpointError


def saved_as(layers: StageLayers, layout: SliceLayout, index: int) -> int:
    """The number by which a checkpoint has what belongs to layer ``index``.

    Where the checkpoint has one module for all uses of a key, as when two of them were on one stage when that pipeline
    was built, and uses are alike, that is the first use.
    """
    tie = layers.tie_of(index)
    if tie is None:
        return layers.first_use(index)
    return index if index in layout.weights or not tie.alike else tie.uses[0]


def stock_state_of_use(
    saved: Saved, layers: StageLayers, index: int, origins: Mapping[int, LayerOrigin]
) -> tuple[str, dict[str, Any], bool]:
    """The file for layer ``index`` among those of stock DeepSpeed, its state of that layer, and whether that is all.

    As in DeepSpeed, all uses take the tied weights of the first that has a file. A use that has none itself takes
    all of that one's if they are alike, else its own weights stay what they are.
    """
    tie, files = layers.tie_of(index), saved.layout.weights
    assert tie is not None
    source = next((use for use in tie.uses if layers.stored_use(use) is not None), index)
    first = _state(saved, files[source])
    if source == index or (layers.stored_use(index) is None and tie.alike):
        return files[source], first, True
    has_file = layers.stored_use(index) is not None
    own = dict(_state(saved, files[index])) if has_file else {}
    for name, there in zip(tie.weights[index], tie.weights[source], strict=True):
        if there not in first:
            raise CheckpointError(f"{saved.path(files[source])}: lacks {there}")
        own[name] = first[there]
        own.update({alias: first[there] for alias, of in origins[index].aliases.items() if of == name and alias in own})
    return files[index if has_file else source], own, has_file


def _state(saved: Saved, name: str) -> dict[str, Any]:
    state = saved.read(name)
    if not isinstance(state, dict):
        raise CheckpointError(f"{saved.path(name)}: holds a {type(state).__name__}, expected the state_dict of a layer")
    return state
