"""Read optimizer state by how a checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable

from ds_dynmo.engine.save.importers.flat import read_flat
from ds_dynmo.engine.save.importers.per_parameter import read_per_parameter
from ds_dynmo.engine.save.importers.unsharded_fp16 import read_unsharded
from ds_dynmo.engine.save.importers.wanted import Wanted
from ds_dynmo.engine.save.manifest import UNSHARDED_FP16
from ds_dynmo.engine.save.saved_files import SavedCheckpoint
from ds_dynmo.engine.state.pieces import FLAT, PER_PARAMETER, StatePieces

__all__ = ["READABLE", "read_state"]

_READERS: dict[str, Callable[[SavedCheckpoint, Wanted], StatePieces]] = {
    PER_PARAMETER: read_per_parameter,
    FLAT: read_flat,
    UNSHARDED_FP16: read_unsharded,
}
READABLE = {PER_PARAMETER: (PER_PARAMETER,), FLAT: (FLAT, UNSHARDED_FP16)}  # by how the engine keeps it


def read_state(saved: SavedCheckpoint, wanted: Wanted) -> StatePieces:
    """Read what an optimizer held for some parameters. Changes nothing.

    Raises:
        CheckpointError: a file does not match the manifest.
    """
    return _READERS[saved.manifest.optimizer](saved, wanted)
