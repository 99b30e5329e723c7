"""What this rank's slice of its stage holds, as the manifest tells it."""

from __future__ import annotations

from ds_dynmo.engine.checkpoint.context import CheckpointContext
from ds_dynmo.engine.checkpoint.layout import SliceLayout, StageLayout, layer_file
from ds_dynmo.engine.deepspeed_adapter.files import slice_number


def own_layout(context: CheckpointContext, stage: StageLayout) -> SliceLayout:
    """A layout of this rank's stage and layers alone; ``stage`` says what is in its optimizer files."""
    layers, slice_index = context.stage.layers, context.engine.grid.get_slice_parallel_rank()
    own = layers.counted_modules()
    stored = {index: layers.stored_use(index) for index in own}
    return SliceLayout(
        stages=(stage,),
        numbers=(slice_number(context.engine),),
        shapes={index: context.origin.layers[index].shapes for index in own},
        weights={
            index: layer_file(index, 0, slice_index) if use is None else layers.file_name(use)
            for index, use in stored.items()
        },
    )
