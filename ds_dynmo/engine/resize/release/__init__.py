"""Give released ranks back: one small interface, and a module for each policy."""

from __future__ import annotations

from ds_dynmo.engine.resize.release.policies import check_policy, policy_for
from ds_dynmo.engine.resize.release.policy import RankLocation, ReleasePolicy, ReleaseRefused

__all__ = ["RankLocation", "ReleasePolicy", "ReleaseRefused", "check_policy", "policy_for"]
