"""The manifests on the disk: one per stage, and one for all, which has the checksums of the others.

Ranks tell each other through the checkpoint's folder, which they share anyway. Each writes what it wrote; the first
rank of each stage makes one manifest of that; rank 0 makes the one for all. So what a rank reads grows with the
replicas of one stage, or with the stages. Nobody lists the folder: a network file system may list less than is there.
"""

from __future__ import annotations

import os
from dataclasses import replace

from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.save.folder import sync
from ds_dynmo.engine.save.manifest import (
    MANIFEST,
    NOT_SHARED,
    Manifest,
    StageManifest,
    part_file,
    stage_manifest_file,
)
from ds_dynmo.engine.save.safe_load import check_file, describe
from ds_dynmo.errors import CheckpointError
from ds_dynmo.files import path_in_errors


def write_part(folder: str, here: RankCoordinates, part: StageManifest) -> None:
    """Write what this rank wrote for the first rank of its stage."""
    _write(os.path.join(folder, part_file(here.stage, here.replica, here.tp_rank)), part.to_json())


def write_stage(folder: str, here: RankCoordinates) -> None:
    """Write the manifest of a stage, on its first rank, once all of its ranks have called :func:`write_part`.

    Raises:
        CheckpointError: a file that a rank wrote is not there.
    """
    ranks = [(replica, tp_rank) for tp_rank in range(here.tp_size) for replica in range(here.replicas)]
    paths = [os.path.join(folder, part_file(here.stage, *rank)) for rank in ranks]
    whole = StageManifest.joined(map(_read_shared, paths))
    whole.check_written(folder)
    path = os.path.join(folder, stage_manifest_file(here.stage))
    _write(path, whole.to_json())
    sync(path)
    for part in paths:
        os.unlink(part)


def write_all(folder: str, manifest: Manifest) -> Manifest:
    """Write the manifest of a checkpoint, on rank 0, once every stage has its own; return it with their content.

    Raises:
        CheckpointError: a manifest of a stage is not there, or a file that a load needs was not written.
    """
    paths = [os.path.join(folder, stage_manifest_file(stage)) for stage in range(manifest.num_stages)]
    whole = manifest.of_stages(list(map(_read_shared, paths)))
    whole.check_complete(folder)
    path = os.path.join(folder, MANIFEST)
    _write(path, replace(manifest, stages=tuple(map(describe, paths))).to_json())
    sync(path)
    return whole


def read_all(folder: str, text: str) -> Manifest:
    """Read the manifests of all stages.

    Args:
        text: the content of the manifest for all.

    Raises:
        CheckpointError: naming a file that is damaged, or is not of this checkpoint.
    """
    path = os.path.join(folder, MANIFEST)
    stages = []
    try:
        manifest = Manifest.from_json(text)
        for number, saved in enumerate(manifest.stages):
            path = os.path.join(folder, stage_manifest_file(number))
            stages.append(_read(check_file(path, saved)))
        return manifest.of_stages(stages)
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _write(path: str, text: str) -> None:
    with path_in_errors(path), open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _read(path: str) -> StageManifest:
    with open(path, encoding="utf-8") as file:
        return StageManifest.from_json(file.read())


def _read_shared(path: str) -> StageManifest:
    """Read what another rank wrote a moment ago."""
    try:
        return _read(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: a rank wrote it, and this one cannot read it: {error}: {NOT_SHARED}") from error
