"""Describe which saved stage holds what of which layer, in plain values, written as JSON beside DeepSpeed's files.

DeepSpeed's layer files are by layer and load anywhere. Its optimizer files are by stage, and identify parameters by
position only. A :class:`Slot` records that position, and a :class:`Manifest` all slots of all stages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.pieces import Slot, StageSlots
from ds_dynmo.errors import CheckpointError
from ds_dynmo.files.checkpoints import FOLDER
from ds_dynmo.placement import Placement

FORMAT = 4
MANIFEST = "dynmo/manifest.json"


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
class Manifest:
    """The content of a checkpoint.

    Attributes:
        placement: where layers were when it was written.
        replicas: data-parallel size.
        optimizer: how optimizer state is kept: :data:`PER_PARAMETER` or :data:`FLAT`.
        optimizer_class: the torch optimizer's class name, for the error where it is another one; "" without one.
        slices: per tensor-parallel slice, what its files hold.
        frozen_excluded: weights of frozen parameters were left out, as the user asked.
        files: every file but this one, by its path in the checkpoint's folder.
        state: counters and what the engine has learnt, as plain JSON.
        replicas_differ: each replica has parameters that no other has.
    """

    placement: Placement
    replicas: int
    optimizer: str
    optimizer_class: str
    slices: tuple[SliceManifest, ...]
    frozen_excluded: bool
    files: dict[str, SavedFile]
    state: dict[str, Any]
    replicas_differ: bool = False

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

    def check_complete(self, folder: str) -> None:
        """Refuse a folder in which files are missing, or are not of the size that their ranks wrote.

        Raises:
            CheckpointError: naming one.
        """
        for name, file in self.files.items():
            path = os.path.join(folder, name)
            found = f"{os.path.getsize(path)} bytes" if os.path.isfile(path) else "no such file"
            if found != f"{file.num_bytes} bytes":
                raise CheckpointError(
                    f"{path}: a rank wrote {file.num_bytes} bytes, and rank 0 finds {found}: save_dir has to be a "
                    "folder that all ranks share"
                )
        for of_slice in self.slices:
            for name in (*map(stage_file, of_slice.numbers), *of_slice.weights.values()):
                if name not in self.files:
                    raise CheckpointError(
                        f"{os.path.join(folder, name)}: no rank wrote it: a save_state_dict of your own has to write "
                        "by the save of the checkpoint_engine that it is given"
                    )

    def to_json(self) -> str:
        """Write the manifest as JSON."""
        values = asdict(self)
        del values["placement"]
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
                slices=tuple(map(SliceManifest.from_parsed, read.pop("slices"))),
                files={path: SavedFile(**file) for path, file in read.pop("files").items()},
                **read,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is not a manifest: {error}") from error
        for of_slice in manifest.slices:
            if not len(of_slice.stages) == len(of_slice.numbers) == manifest.num_stages:
                raise ValueError(f"it has {len(of_slice.stages)} stages but the partition {manifest.placement}")
        return manifest


def rank_file(stage: int, replica: int, slice_index: int) -> str:
    """Return the name of ds_dynmo's file of a rank: the states of its random number generators."""
    return f"{FOLDER}/rank-pipe_{stage:02d}-data_{replica:02d}-model_{slice_index:02d}.pt"


def flat_file(stage: int, replica: int, slice_index: int) -> str:
    """Return the name of ds_dynmo's file for what DeepSpeed's lacks of a rank's flat shards."""
    return f"{FOLDER}/flat-pipe_{stage:02d}-data_{replica:02d}-model_{slice_index:02d}.pt"


def stage_file(number: int) -> str:
    """Return the name of DeepSpeed's file of one slice of a stage: optimizer, scheduler, counters, client state."""
    return f"mp_rank_{number:02d}_model_states.pt"
