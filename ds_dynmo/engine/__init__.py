"""The pipeline engine, which measures, decides, migrates and trains.

Names are loaded on first use, because models import a module of the adapter without the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_dynmo.engine.deepspeed.shm_operator import skip_shm_operator
    from ds_dynmo.engine.engine import DynMoPipelineEngine
    from ds_dynmo.engine.initialization import initialize
    from ds_dynmo.engine.token_mean import weigh_by_tokens

__all__ = ["DynMoPipelineEngine", "initialize", "skip_shm_operator", "weigh_by_tokens"]


def __getattr__(name: str) -> Any:
    if name == "DynMoPipelineEngine":
        from ds_dynmo.engine.engine import DynMoPipelineEngine

        return DynMoPipelineEngine
    if name == "initialize":
        try:
            from ds_dynmo.engine.initialization import initialize
        except ImportError:
            from ds_dynmo.engine.deepspeed.probe import check_deepspeed

            check_deepspeed()  # raises, and names what DeepSpeed lacks
            raise
        return initialize
    if name == "skip_shm_operator":
        from ds_dynmo.engine.deepspeed.shm_operator import skip_shm_operator

        return skip_shm_operator
    if name == "weigh_by_tokens":
        from ds_dynmo.engine.token_mean import weigh_by_tokens

        return weigh_by_tokens
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
