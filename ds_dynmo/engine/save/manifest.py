"""Describe which saved stage holds what of which layer, in plain values, written as JSON beside DeepSpeed's files.

DeepSpeed's layer files are by layer and load anywhere. Its optimizer files are by stage, and identify parameters by
position only. A :class:`Slot` records that position, a :class:`StageManifest` the slots and the files of one stage, and
a :class:`Manifest` the stages: on the disk by their files, in memory by their content.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.pieces import Slot, StageSlots
from ds_dynmo.errors import CheckpointError
from ds_dynmo.files.checkpoints import FOLDER
from ds_dynmo.placement import Placement

FORMAT = 7
MANIFEST = "dynmo/manifest.json"
NOT_SHARED = "save_dir has to be a folder that all ranks share"


@dataclass(frozen=True)
class SliceManifest:
    """The contents of the files of one tensor-parallel slice.

    Attributes:
        stages: per saved stage, the slots of its optimizer files.
        numbers: per saved stage, DeepSpeed's number of this slice of it in file names ("mp_rank").
        shapes: per layer with a module, the shapes of its parameters when the engine was constructed, by name.
        weights: per layer with a module, the file that holds its weights.
    """

    stages: tuple[StageSlots, ...]
    numbers: tuple[int, ...]
    shapes: dict[int, dict[str, list[int]]]
    weights: dict[int, str]

    def slots(self, *, prefer: int) -> dict[ParamKey, tuple[int, Slot]]:
        """Find for each parameter a stage that holds it and where: stage ``prefer`` if it does, else the first."""
        found: dict[ParamKey, tuple[int, Slot]] = {}
        for stage in sorted(range(len(self.stages)), key=lambda stage: (stage != prefer, stage)):
            for slot in self.stages[stage].slots:
                found.setdefault(slot.key, (stage, slot))
        return found

    @classmethod
    def from_parsed(cls, read: dict[str, Any]) -> SliceManifest:
        """Build the manifest from parsed JSON."""
        stages = tuple(
            StageSlots(
                tuple(Slot(**slot) for slot in stage["slots"]),
                tuple(stage["shard_numels"]),
                tuple(stage["detached_numels"]),
            )
            for stage in read["stages"]
        )
        return cls(
            stages=stages,
            numbers=tuple(int(number) for number in read["numbers"]),
            shapes={int(layer): shapes for layer, shapes in read["shapes"].items()},
            weights={int(layer): path for layer, path in read["weights"].items()},
        )


def join(every: Iterable[tuple[int, int, SliceManifest]]) -> tuple[SliceManifest, ...]:
    """Join every rank's slice, stage and manifest of that stage alone into the manifests of all slices."""
    table: dict[int, dict[int, SliceManifest]] = {}
    for slice_index, stage, manifest in every:
        table.setdefault(slice_index, {})[stage] = manifest
    joined = []
    for _, by_stage in sorted(table.items()):
        manifests = [manifest for _, manifest in sorted(by_stage.items())]
        joined.append(
            SliceManifest(
                stages=tuple(stage for manifest in manifests for stage in manifest.stages),
                numbers=tuple(number for manifest in manifests for number in manifest.numbers),
                shapes={layer: shapes for manifest in manifests for layer, shapes in manifest.shapes.items()},
                weights={layer: path for manifest in manifests for layer, path in manifest.weights.items()},
            )
        )
    return tuple(joined)


@dataclass(frozen=True)
class SavedFile:
    """A file as it was when it was written."""

    num_bytes: int
    fingerprint: str


@dataclass(frozen=True)
class StageManifest:
    """The content of the files of one stage, or of those that one of its ranks wrote.

    Attributes:
        slices: per tensor-parallel slice, what its files hold of this stage; empty for a rank whose stage and slice
            another replica describes.
        files: every file of the stage, by its path in the checkpoint's folder.
    """

    slices: tuple[SliceManifest, ...]
    files: dict[str, SavedFile]

    @classmethod
    def joined(cls, parts: Iterable[StageManifest]) -> StageManifest:
        """Join what the ranks of a stage wrote, ordered by slice."""
        whole = cls((), {})
        for part in parts:
            whole = cls((*whole.slices, *part.slices), {**whole.files, **part.files})
        return whole

    def check_written(self, folder: str) -> None:
        """Refuse a folder in which files are missing, or are not of the size that their ranks wrote.

        Raises:
            CheckpointError: naming one.
        """
        for name, file in self.files.items():
            path = os.path.join(folder, name)
            found = f"{os.path.getsize(path)} bytes" if os.path.isfile(path) else "no such file"
            if found != f"{file.num_bytes} bytes":
                raise CheckpointError(
                    f"{path}: a rank wrote {file.num_bytes} bytes, and the first rank of its stage finds {found}: "
                    f"{NOT_SHARED}"
                )

    def to_json(self) -> str:
        """Write the manifest as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> StageManifest:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: the text is not a manifest of a stage.
        """
        try:
            read = json.loads(text)
            if outside := [path for path in read["files"] if os.path.isabs(path) or ".." in path.split("/")]:
                raise ValueError(f"{outside[0]} is not in the checkpoint's folder")
            return cls(
                slices=tuple(map(SliceManifest.from_parsed, read.pop("slices"))),
                files={path: SavedFile(**file) for path, file in read.pop("files").items()},
                **read,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is not a manifest: {error}") from error


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        placement: where layers were when it was written.
        replicas: data-parallel size.
        optimizer: how optimizer state is kept: :data:`PER_PARAMETER` or :data:`FLAT`.
        optimizer_class: the torch optimizer's class name, for the error where it is another one; "" without one.
        frozen_excluded: weights of frozen parameters were left out, as the user asked.
        state: counters and what the engine has learnt, as plain JSON.
        replicas_differ: each replica has parameters that no other has.
        stages: per stage, the file of its manifest.
        slices: per tensor-parallel slice, what its files hold: from the manifests of stages.
        files: every file but the manifests, by its path in the checkpoint's folder: from the manifests of stages.
    """

    placement: Placement
    replicas: int
    optimizer: str
    optimizer_class: str
    frozen_excluded: bool
    state: dict[str, Any]
    replicas_differ: bool = False
    stages: tuple[SavedFile, ...] = ()
    slices: tuple[SliceManifest, ...] = ()
    files: dict[str, SavedFile] = field(default_factory=dict)

    @property
    def partition(self) -> tuple[int, ...]:
        """The boundaries of :attr:`placement`."""
        return self.placement.boundaries

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def stock(self) -> bool:
        """Whether stock DeepSpeed wrote the checkpoint: this manifest then was inferred from the engine."""
        return not self.files

    def of_stages(self, stages: Sequence[StageManifest]) -> Manifest:
        """Return the manifest with the content of the manifests of its stages.

        Raises:
            ValueError: a stage has not as many slices as the first.
        """
        if any(len(stage.slices) != len(stages[0].slices) for stage in stages):
            raise ValueError(f"its stages have {[len(stage.slices) for stage in stages]} slices")
        slices = join(
            (index, number, of_slice)
            for number, stage in enumerate(stages)
            for index, of_slice in enumerate(stage.slices)
        )
        return replace(
            self, slices=slices, files={name: file for stage in stages for name, file in stage.files.items()}
        )

    def check_complete(self, folder: str) -> None:
        """Refuse a checkpoint that lacks a file that a load needs.

        Raises:
            CheckpointError: naming one.
        """
        for of_slice in self.slices:
            for name in (*map(stage_file, of_slice.numbers), *of_slice.weights.values()):
                if name not in self.files:
                    raise CheckpointError(
                        f"{os.path.join(folder, name)}: no rank wrote it: a save_state_dict of your own has to write "
                        "by the save of the checkpoint_engine that it is given"
                    )

    def to_json(self) -> str:
        """Write the manifest as JSON, without what the manifests of stages hold."""
        values = asdict(replace(self, slices=(), files={}))
        for name in ("placement", "slices", "files"):
            del values[name]
        return json.dumps({"format": FORMAT, **self.placement.as_record("partition"), **values}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: the text is not a manifest of this format.
        """
        try:
            read = json.loads(text)
            if (version := read.pop("format")) != FORMAT:
                raise ValueError(f"its format is {version}, expected {FORMAT}: the ds_dynmo that wrote it reads it")
            manifest = cls(
                placement=Placement.of(read.pop("partition"), read.pop("partition_owners", None)),
                stages=tuple(SavedFile(**file) for file in read.pop("stages")),
                **read,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is not a manifest: {error}") from error
        if len(manifest.stages) != manifest.num_stages:
            raise ValueError(f"it has {len(manifest.stages)} stages but the partition {manifest.placement}")
        return manifest


def stage_manifest_file(stage: int) -> str:
    """Return the name of the manifest of a stage."""
    return f"{FOLDER}/manifest-pipe_{stage:02d}.json"


def part_file(stage: int, replica: int, slice_index: int) -> str:
    """Return the name of the file in which a rank tells the first rank of its stage what it wrote."""
    return f"{FOLDER}/written-pipe_{stage:02d}-data_{replica:02d}-model_{slice_index:02d}.json"


def rank_file(stage: int, replica: int, slice_index: int) -> str:
    """Return the name of ds_dynmo's file of a rank: the states of its random number generators."""
    return f"{FOLDER}/rank-pipe_{stage:02d}-data_{replica:02d}-model_{slice_index:02d}.pt"


def flat_file(stage: int, replica: int, slice_index: int) -> str:
    """Return the name of ds_dynmo's file for what DeepSpeed's lacks of a rank's flat shards."""
    return f"{FOLDER}/flat-pipe_{stage:02d}-data_{replica:02d}-model_{slice_index:02d}.pt"


def stage_file(number: int) -> str:
    """Return the name of DeepSpeed's file of one slice of a stage: optimizer, scheduler, counters, client state."""
    return f"mp_rank_{number:02d}_model_states.pt"
