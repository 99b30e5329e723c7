"""What becomes of ranks that are released: one small interface, a module for each policy."""

from ds_dynmo.engine.elastic.release.policy import Place, ReleasePolicy, ReleaseRefused
from ds_dynmo.engine.elastic.release.registry import check_policy, policy_for

__all__ = ["Place", "ReleasePolicy", "ReleaseRefused", "check_policy", "policy_for"]
