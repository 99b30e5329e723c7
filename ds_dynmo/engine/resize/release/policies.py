"""Choose a policy by its name."""

from __future__ import annotations

from pathlib import Path

from ds_dynmo.config import RepackConfig
from ds_dynmo.engine.resize.release.command import Command
from ds_dynmo.engine.resize.release.kubernetes import SECRETS, Kubernetes, check_pod
from ds_dynmo.engine.resize.release.policy import ReleasePolicy


def check_policy(config: RepackConfig) -> None:
    """Refuse a policy that cannot work here.

    Raises:
        ConfigError: naming what is missing.
    """
    if config.release == "kubernetes":
        check_pod()


def policy_for(config: RepackConfig, secrets: Path = SECRETS) -> ReleasePolicy | None:
    """Build the policy that ``dynmo.repack.release`` names; None: no resource manager is told.

    Args:
        secrets: where the platform puts credentials.
    """
    if config.command is not None:
        return Command(config.command, config.release_timeout_seconds)
    if config.release == "kubernetes":
        return Kubernetes(config.kubernetes, config.release_timeout_seconds, secrets)
    return None
