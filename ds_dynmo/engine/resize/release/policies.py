"""Choose a policy by its name; those that concern the released processes alone are here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_dynmo.config import RepackConfig
from ds_dynmo.engine.resize.release.command import Command
from ds_dynmo.engine.resize.release.kubernetes import SECRETS, Kubernetes, check_pod
from ds_dynmo.engine.resize.release.policy import RankLocation, ReleasePolicy


class _Silent:
    silent = True

    def release(self, released: Sequence[RankLocation], staying: Sequence[RankLocation]) -> str:
        """Do nothing: there is no resource manager."""
        return ""


class Exit(_Silent):
    """A released rank's process ends: its script leaves the training loop where ``engine.released`` is True."""

    parks, restarts = False, False


class Park(_Silent):
    """A released rank's process stays, with nothing on its accelerator, and can be taken back."""

    parks, restarts = True, False


class Checkpoint(_Silent):
    """All ranks stop after a checkpoint, and the job is launched anew at the smaller size (the paper's alternative)."""

    parks, restarts = False, True


def check_policy(config: RepackConfig) -> None:
    """Refuse a policy that cannot work here.

    Raises:
        ConfigError: naming what is missing.
    """
    if config.release == "kubernetes":
        check_pod()


def policy_for(config: RepackConfig, secrets: Path = SECRETS) -> ReleasePolicy:
    """Build the policy that ``dynmo.repack.release`` names; ``secrets``: where the platform puts credentials."""
    if config.release == "park":
        return Park()
    if config.release == "checkpoint":
        return Checkpoint()
    if config.release == "command":
        assert config.command is not None
        return Command(config.command, config.release_timeout_seconds)
    if config.release == "kubernetes":
        return Kubernetes(config.kubernetes, config.release_timeout_seconds, secrets)
    return Exit()
