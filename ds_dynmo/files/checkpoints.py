"""Names that files of a checkpoint have beside DeepSpeed's, for the engine and for models that read them."""

from __future__ import annotations

__all__ = ["FOLDER", "LEFT_OUT", "REPLICA_OWN", "layer_file"]

FOLDER = "dynmo"
LEFT_OUT = "left_out"  # in a layer's file: digests of frozen weights that were not saved, by name
REPLICA_OWN = "replica_own"  # in a layer's file: "weight" and "state" of each parameter that no other replica has


def layer_file(layer: int, replica: int, slice_index: int) -> str:
    """Return the name of ds_dynmo's file of a layer, with what DeepSpeed's lacks; one per replica and slice.

    >>> layer_file(3, 1, 0)
    'dynmo/layer_03-data_01-model_00.pt'
    """
    return f"{FOLDER}/layer_{layer:02d}-data_{replica:02d}-model_{slice_index:02d}.pt"
