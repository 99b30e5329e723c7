"""Which kind of optimizer files an engine has."""

from __future__ import annotations

from typing import Any

from ds_dynmo.engine.checkpoint.flat_files import FlatFiles
from ds_dynmo.engine.checkpoint.optimizer_files import OptimizerFiles, PerParameter
from ds_dynmo.engine.optimizer.flat_state import FlatState


def optimizer_files(engine: Any) -> OptimizerFiles:
    """The implementation that suits an engine's optimizer."""
    if isinstance(engine._state, FlatState):
        return FlatFiles(engine, engine._state)
    return PerParameter(engine.basic_optimizer, engine.device)
