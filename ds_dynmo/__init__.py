"""DynMo for DeepSpeed: a pipeline that measures its layers while it trains, and moves them to balance its stages.

Names are loaded on first use, so that each module needs only its dependencies: ``ds_dynmo.partitioners`` only numpy.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ds_dynmo.unread_section import refuse_unread_section

if TYPE_CHECKING:
    __version__: str
    from ds_dynmo.config import DynMoConfig
    from ds_dynmo.engine import DynMoPipelineEngine, initialize, skip_shm_operator, weigh_by_tokens
    from ds_dynmo.errors import (
        CheckpointError,
        ConfigError,
        MigrationError,
        PartitionError,
        RankLostError,
        ReleasedError,
        ScheduleError,
    )
    from ds_dynmo.files import claim_folder
    from ds_dynmo.launch import end_with_launcher, set_rank_variables
    from ds_dynmo.layer import Layer, LayerParameter
    from ds_dynmo.plan import LayerCost, MeasuredReport, Profile, RebalanceReport, RepackReport
    from ds_dynmo.weight_gradients import defer_weight_gradient

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DynMoConfig",
    "DynMoPipelineEngine",
    "Layer",
    "LayerCost",
    "LayerParameter",
    "MeasuredReport",
    "MigrationError",
    "PartitionError",
    "Profile",
    "RankLostError",
    "RebalanceReport",
    "ReleasedError",
    "RepackReport",
    "ScheduleError",
    "__version__",
    "claim_folder",
    "defer_weight_gradient",
    "end_with_launcher",
    "initialize",
    "set_rank_variables",
    "skip_shm_operator",
    "weigh_by_tokens",
]

_MODULES = {
    "DynMoConfig": "config",
    "claim_folder": "files",
    "defer_weight_gradient": "weight_gradients",
    **dict.fromkeys(("DynMoPipelineEngine", "initialize", "skip_shm_operator", "weigh_by_tokens"), "engine"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "errors"),
    **dict.fromkeys(("end_with_launcher", "set_rank_variables"), "launch"),
    **dict.fromkeys(("Layer", "LayerParameter"), "layer"),
    **dict.fromkeys(("LayerCost", "MeasuredReport", "Profile", "RebalanceReport", "RepackReport"), "plan"),
}
"""By name, the module that defines it."""


refuse_unread_section()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version(__name__)
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name in _MODULES.values():
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
