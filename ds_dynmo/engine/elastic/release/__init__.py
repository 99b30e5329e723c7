"""Give released ranks back: one small interface, and a module for each policy."""

from __future__ import annotations

from typing import Any

from ds_dynmo.engine.elastic.release.policies import check_policy, policy_for
from ds_dynmo.engine.elastic.release.policy import RankLocation, ReleasePolicy, ReleaseRefused
from ds_dynmo.old_names import lookup

__all__ = ["RankLocation", "ReleasePolicy", "ReleaseRefused", "check_policy", "policy_for"]


def __getattr__(name: str) -> Any:
    return lookup(__name__, name)
