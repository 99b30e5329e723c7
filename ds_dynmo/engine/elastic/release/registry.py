"""From the configuration to a policy."""

from __future__ import annotations

from ds_dynmo.config import RepackConfig
from ds_dynmo.engine.elastic.release.command import Command
from ds_dynmo.engine.elastic.release.policy import ReleasePolicy
from ds_dynmo.engine.elastic.release.processes import Exit, Park


def policy_for(config: RepackConfig) -> ReleasePolicy:
    """What ``dynmo.repack.release`` names."""
    if config.release == "park":
        return Park()
    if config.release == "command":
        assert config.command is not None
        return Command(config.command, config.release_timeout_seconds)
    return Exit()
