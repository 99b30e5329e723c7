"""Checkpoints of ds-dynmo-train: read the metadata of a run, or pretend that a run was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ds_dynmo.cli.training.resuming import METADATA_KEY, client_state
from ds_dynmo.engine.save.folder import write_latest
from ds_dynmo.engine.save.manifest import MANIFEST, stage_file


def metadata_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads(torch.load(checkpoint / stage_file(0), weights_only=False)[METADATA_KEY])


def save_metadata(checkpoint: Path, metadata: dict[str, Any]) -> None:
    """Let ``checkpoint`` be the latest one, of a run with this metadata. Nothing else is in that file afterwards."""
    (checkpoint / MANIFEST).parent.mkdir(parents=True, exist_ok=True)
    (checkpoint / MANIFEST).touch()
    torch.save(client_state(metadata), checkpoint / stage_file(0))
    write_latest(str(checkpoint.parent), checkpoint.name)
