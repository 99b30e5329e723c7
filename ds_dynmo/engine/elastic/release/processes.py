"""Policies that concern the released processes alone."""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynmo.engine.elastic.release.policy import Place


class Exit:
    """A released rank's process ends: its script leaves the training loop where ``engine.released`` is True."""

    parks, restarts = False, False

    def release(self, gone: Sequence[Place], staying: Sequence[Place]) -> str:
        """Nobody else has to be told."""
        return ""


class Park:
    """A released rank's process stays, with nothing on its accelerator, and can be taken back."""

    parks, restarts = True, False

    def release(self, gone: Sequence[Place], staying: Sequence[Place]) -> str:
        """Nobody else has to be told."""
        return ""


class Checkpoint:
    """All ranks stop after a checkpoint, and the job is launched anew at the smaller size (the paper's alternative)."""

    parks, restarts = False, True

    def release(self, gone: Sequence[Place], staying: Sequence[Place]) -> str:
        """Whoever launches the job reads what was written beside the checkpoint."""
        return ""
