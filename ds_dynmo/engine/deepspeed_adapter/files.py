"""What DeepSpeed writes into a checkpoint, and what an engine says of one."""

from __future__ import annotations

from typing import Any


def slice_number(engine: Any) -> int:
    """The number of this rank's tensor-parallel slice in the names of DeepSpeed's files."""
    return int(engine.grid.get_model_parallel_rank()) if engine.mp_world_size > 1 else 0
