"""Policies that concern the released processes alone."""

from __future__ import annotations

from collections.abc import Sequence

from ds_dynmo.engine.elastic.release.policy import Place


class _Silent:
    silent = True

    def release(self, gone: Sequence[Place], staying: Sequence[Place]) -> str:
        """Nobody else has to be told."""
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
