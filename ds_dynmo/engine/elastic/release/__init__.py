"""Give released ranks back: one small interface, and a module for each policy."""

from __future__ import annotations

import warnings
from typing import Any

from ds_dynmo.engine.elastic.release.policies import check_policy, policy_for
from ds_dynmo.engine.elastic.release.policy import RankLocation, ReleasePolicy, ReleaseRefused

__all__ = ["RankLocation", "ReleasePolicy", "ReleaseRefused", "check_policy", "policy_for"]


def __getattr__(name: str) -> Any:
    if name == "Place":
        warnings.warn(f"{__name__}.Place is RankLocation now", DeprecationWarning, stacklevel=2)
        return RankLocation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
