"""Release policies, which hand back accelerators of released ranks: an interface, and a module per policy."""

from __future__ import annotations

from ds_dynmo.engine.resize.release.policies import check_policy, policy_for
from ds_dynmo.engine.resize.release.policy import RankLocation, ReleasePolicy, ReleaseRefused

__all__ = ["RankLocation", "ReleasePolicy", "ReleaseRefused", "check_policy", "policy_for"]
