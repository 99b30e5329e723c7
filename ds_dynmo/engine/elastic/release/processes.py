"""Policies that concern the released processes alone."""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynmo.engine.elastic.release.policy import Place


class Exit:
    """A released rank's process ends: its script leaves the training loop where ``engine.released`` is True."""

    parks = False

    def release(self, gone: Sequence[Place], staying: Sequence[Place]) -> str:
        """Nobody else has to be told."""
        return ""


class Park:
    """A released rank's process stays, with nothing on its accelerator, and can be taken back."""

    parks = True

    def release(self, gone: Sequence[Place], staying: Sequence[Place]) -> str:
        """Nobody else has to be told."""
        return ""
