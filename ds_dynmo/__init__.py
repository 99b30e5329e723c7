"""DynMo for DeepSpeed: a pipeline that measures itself while it trains and moves layers until its stages are even.

Names that need torch and DeepSpeed are loaded when first used.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ds_dynmo.config import DynMoConfig
from ds_dynmo.errors import (
    CheckpointError,
    ConfigError,
    MigrationError,
    PartitionError,
    ReleasedError,
    ScheduleError,
)
from ds_dynmo.launchers import end_with_launcher
from ds_dynmo.old_names import lookup, register_modules
from ds_dynmo.plan import LayerCost, MeasuredReport, Profile, RebalanceReport, RepackReport
from ds_dynmo.rank_variables import set_rank_variables

if TYPE_CHECKING:
    __version__: str
    from ds_dynmo.engine import DynMoPipelineEngine, initialize, skip_shm_operator
    from ds_dynmo.weight_gradients import defer_weight_gradient

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DynMoConfig",
    "DynMoPipelineEngine",
    "LayerCost",
    "MeasuredReport",
    "MigrationError",
    "PartitionError",
    "Profile",
    "RebalanceReport",
    "ReleasedError",
    "RepackReport",
    "ScheduleError",
    "__version__",
    "defer_weight_gradient",
    "end_with_launcher",
    "initialize",
    "set_rank_variables",
    "skip_shm_operator",
]

register_modules(__name__)


def __getattr__(name: str) -> Any:
    if name in ("DynMoPipelineEngine", "initialize", "skip_shm_operator"):
        from ds_dynmo import engine

        return getattr(engine, name)
    if name == "__version__":
        return version("ds_dynmo")
    if name == "defer_weight_gradient":
        from ds_dynmo.weight_gradients import defer_weight_gradient

        return defer_weight_gradient
    return lookup(__name__, name)
