"""From the configuration to a policy."""

from __future__ import annotations

from pathlib import Path

from ds_dynmo.config import RepackConfig
from ds_dynmo.engine.elastic.release.command import Command
from ds_dynmo.engine.elastic.release.kubernetes import SECRETS, Kubernetes, check_pod
from ds_dynmo.engine.elastic.release.policy import ReleasePolicy
from ds_dynmo.engine.elastic.release.processes import Checkpoint, Exit, Park
from ds_dynmo.engine.elastic.release.slurm import Slurm, check_scontrol


def check_policy(config: RepackConfig) -> None:
    """Refuse a policy that cannot work here.

    Raises:
        ConfigError: naming what is missing.
    """
    if config.release == "kubernetes":
        check_pod()
    if config.release == "slurm":
        check_scontrol()


def policy_for(config: RepackConfig, secrets: Path = SECRETS) -> ReleasePolicy:
    """What ``dynmo.repack.release`` names; ``secrets``: where the platform puts credentials."""
    if config.release == "park":
        return Park()
    if config.release == "checkpoint":
        return Checkpoint()
    if config.release == "command":
        assert config.command is not None
        return Command(config.command, config.release_timeout_seconds)
    if config.release == "kubernetes":
        return Kubernetes(config.kubernetes, config.release_timeout_seconds, secrets)
    if config.release == "slurm":
        return Slurm(config.release_timeout_seconds)
    return Exit()
