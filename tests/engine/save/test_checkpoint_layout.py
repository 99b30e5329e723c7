"""Where saved shards hold the elements of a parameter, and the manifests that record it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_dynmo import CheckpointError
from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.save import manifest_files
from ds_dynmo.engine.save.manifest import (
    FOLDER,
    MANIFEST,
    Manifest,
    SavedFile,
    SliceManifest,
    StageManifest,
    join,
    part_file,
    stage_file,
    stage_manifest_file,
)
from ds_dynmo.engine.save.safe_load import describe
from ds_dynmo.engine.state.pieces import Slot, StageSlots
from ds_dynmo.placement import Placement

CHAIN, V = Placement.chain([0, 1, 3]), Placement.v([0, 1, 2, 3, 4])


SLOTS = [Slot(0, "w", 0, 0, 0, 4), Slot(1, "w", 0, 1, 4, 2)]


def manifest(placement: Placement = CHAIN) -> Manifest:
    return Manifest(
        placement=placement,
        replicas=2,
        optimizer="flat",
        optimizer_class="AdamW",
        frozen_excluded=False,
        state={"micro_steps": 4},
        stages=(SavedFile(3, "f"), SavedFile(4, "g")),
    )


def of_stage(stage: int, slice_index: int = 0) -> SliceManifest:
    """Describe a slice of one of two stages; the second holds the tied parameter of the first too."""
    return SliceManifest(
        stages=(StageSlots((SLOTS[stage], *SLOTS[:stage]), (2 + stage,)),),
        numbers=(2 * slice_index + stage,),
        shapes={stage: {"w": [2, 2]}},
        weights={stage: f"layer_0{stage}-model_0{slice_index}-model_states.pt"},
    )


def test_manifests_are_read_as_they_were_written() -> None:
    for written in map(manifest, (CHAIN, V)):
        assert Manifest.from_json(written.to_json()) == written
    stage = StageManifest((of_stage(1, 0), of_stage(1, 1)), {"a": SavedFile(3, "f")})
    assert StageManifest.from_json(stage.to_json()) == stage


def test_a_layer_of_a_v_is_found_in_the_stage_that_holds_its_chunk() -> None:
    first, last = (StageManifest((of_stage(stage),), {}) for stage in (0, 1))
    whole = manifest(V).of_stages([first, last])
    assert [whole.slices[0].slots(prefer=stage)[1, "w"] for stage in (0, 1)] == [(1, SLOTS[1])] * 2


def test_a_tied_parameter_is_read_from_the_own_stage_or_the_first() -> None:
    slots = join((0, stage, of_stage(stage)) for stage in (0, 1))[0]
    assert [slots.slots(prefer=stage)[0, "w"][0] for stage in (0, 1, 2)] == [0, 1, 0]


def test_slice_layouts_are_joined_from_those_of_all_ranks() -> None:
    def layout_of(slice_index: int, stage: int) -> tuple[int, int, SliceManifest]:
        number = 2 * stage + slice_index
        slots = (Slot(stage, "w", 0, 0, 0, 1 + slice_index),)
        layers = {stage: {"w": [1 + slice_index]}}
        return slice_index, stage, SliceManifest((StageSlots(slots),), (number,), layers, {stage: f"file {number}"})

    every = [layout_of(slice_index, stage) for stage in (1, 0) for slice_index in (1, 0)]
    first, second = join([*every, *every])  # two replicas
    assert (first.numbers, second.numbers) == ((0, 2), (1, 3))
    assert first.shapes == {0: {"w": [1]}, 1: {"w": [1]}} and second.shapes == {0: {"w": [2]}, 1: {"w": [2]}}
    assert second.weights == {0: "file 1", 1: "file 3"}
    assert [stage.slots[0].layer for stage in second.stages] == [0, 1]


def test_an_invalid_manifest_is_refused() -> None:
    says = r"it is not a manifest|its format is 6, expected 7|Expecting property name"
    for text in ("{", "[]", '{"format": 6}', '{"format": 7}', "null"):
        for kind in (Manifest, StageManifest):
            with pytest.raises(ValueError, match=says):
                pytest.fail(f"{text}: {kind.from_json(text)}")
    with pytest.raises(ValueError, match="3 stages but the partition"):
        Manifest.from_json(replace(manifest(), stages=(SavedFile(1, ""),) * 3).to_json())
    with pytest.raises(ValueError, match=r"its stages have \[1, 0\] slices"):
        manifest().of_stages([StageManifest((of_stage(0),), {}), StageManifest((), {})])
    of_no_layer = manifest().to_json().replace('1,\n  3\n ],\n "replicas"', '0,\n  3\n ],\n "replicas"')
    with pytest.raises(ValueError, match="stage 0 would own no layer"):
        Manifest.from_json(of_no_layer)


# -- on the disk --------------------------------------------------------------------------------------

RANKS = [
    RankCoordinates(stage=stage, num_stages=2, replica=replica, replicas=2, tp_rank=tp_rank, tp_size=2)
    for stage in (0, 1)
    for replica in (0, 1)
    for tp_rank in (0, 1)
]


def write_files(folder: Path) -> None:
    """Write what every rank of two stages, two replicas and two slices writes, and its list of that."""
    (folder / FOLDER).mkdir(parents=True)
    for here in RANKS:
        slices = () if here.replica else (of_stage(here.stage, here.tp_rank),)
        of_slice = [name for found in slices for name in (*map(stage_file, found.numbers), *found.weights.values())]
        names = [*of_slice, f"{FOLDER}/{here.stage}{here.replica}{here.tp_rank}"]
        for name in names:
            (folder / name).write_text(name)
        files = {name: describe(str(folder / name)) for name in names}
        manifest_files.write_part(str(folder), here, StageManifest(slices, files))


def firsts() -> list[RankCoordinates]:
    return [here for here in RANKS if here.replica == here.tp_rank == 0]


def write_manifests(folder: Path) -> Manifest:
    for here in firsts():
        manifest_files.write_stage(str(folder), here)
    return manifest_files.write_all(str(folder), replace(manifest(), stages=()))


def read_manifests(folder: Path) -> Manifest:
    return manifest_files.read_all(str(folder), (folder / MANIFEST).read_text())


def test_stages_list_what_their_ranks_wrote_and_one_manifest_has_all_stages(tmp_path: Path) -> None:
    write_files(tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    written = {name for name in names if "written" not in name}
    whole, read = write_manifests(tmp_path), read_manifests(tmp_path)
    assert (read.slices, read.files) == (whole.slices, whole.files) and read.files.keys() == written
    assert [found.numbers for found in read.slices] == [(0, 1), (2, 3)] and len(read.stages) == 2
    manifests = {MANIFEST, stage_manifest_file(0), stage_manifest_file(1)}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == written | manifests


def test_a_file_that_the_first_rank_of_its_stage_or_rank_0_does_not_find_is_refused(tmp_path: Path) -> None:
    table = [
        (f"{FOLDER}/111", "a rank wrote 9 bytes, and the first rank of its stage finds "),
        (part_file(1, 1, 1), "a rank wrote it, and this one cannot read it: "),
    ]
    for number, (name, says) in enumerate(table):
        for how in ("missing", "shorter"):
            write_files(folder := tmp_path / f"{number}{how}")
            (folder / name).unlink() if how == "missing" else (folder / name).write_text("{")
            manifest_files.write_stage(str(folder), firsts()[0])
            with pytest.raises(CheckpointError, match=f"{name}: {says}.*a folder that all ranks share"):
                pytest.fail(f"{name} {how}: {manifest_files.write_stage(str(folder), firsts()[1])}")
            with pytest.raises(CheckpointError, match=r"manifest-pipe_01.json: a rank wrote it, and this one cannot"):
                pytest.fail(f"{name} {how}: {manifest_files.write_all(str(folder), manifest())}")


def test_a_file_that_no_rank_wrote_is_refused(tmp_path: Path) -> None:
    """It may be one that another stage would have written: that of a tied layer."""
    write_files(tmp_path)
    stage = RANKS[-1].stage
    lacks = replace(of_stage(stage), weights={stage: "layer_07-model_states.pt"})
    manifest_files.write_part(str(tmp_path), firsts()[1], StageManifest((lacks,), {}))
    with pytest.raises(CheckpointError, match=r"mp_rank_01_model_states.pt: no rank wrote it"):
        write_manifests(tmp_path)


def test_a_manifest_of_a_stage_that_is_not_of_this_checkpoint_is_refused(tmp_path: Path) -> None:
    saved, other = tmp_path / "saved", tmp_path / "other"
    for folder in (saved, other):
        write_files(folder)
        if folder == other:
            manifest_files.write_part(str(other), RANKS[-1], StageManifest((), {}))
        write_manifests(folder)
    path, text = saved / stage_manifest_file(1), (saved / stage_manifest_file(1)).read_text()
    changed = {
        "truncated": text[:-10],
        "flipped": text.replace(f"{FOLDER}/111", f"{FOLDER}/110"),
        "of another save": (other / stage_manifest_file(1)).read_text(),
        "of another stage": (saved / stage_manifest_file(0)).read_text(),
        "missing": None,
    }
    for how, content in changed.items():
        assert content != text, how
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(CheckpointError, match=r"manifest-pipe_01.json: "):
            pytest.fail(f"{how}: {read_manifests(saved)}")
