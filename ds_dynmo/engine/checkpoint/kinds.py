"""Which kind of optimizer files an engine has."""

from __future__ import annotations

from ds_dynmo.engine.checkpoint.flat_files import FlatFiles
from ds_dynmo.engine.checkpoint.optimizer_files import OptimizerFiles, PerParameter
from ds_dynmo.engine.optimizer.flat_state import FlatState
from ds_dynmo.engine.stage import StageContext


def optimizer_files(stage: StageContext) -> OptimizerFiles:
    """The implementation that suits the optimizer of a stage."""
    if isinstance(stage.state, FlatState):
        return FlatFiles(stage.state, stage.engine.device, stage.optimizer.name_parameters)
    return PerParameter(stage.engine.basic_optimizer, stage.engine.device)
