"""Where saved shards hold the elements of a parameter, and the manifest that records it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_dynmo.engine.save.manifest import Manifest, SavedFile, SliceManifest, join
from ds_dynmo.engine.state.pieces import Slot, StageSlots
from ds_dynmo.placement import Placement

CHAIN, V = Placement.chain([0, 1, 3]), Placement.v([0, 1, 2, 3, 4])


def manifest(placement: Placement = CHAIN) -> Manifest:
    slots = [Slot(0, "w", 0, 0, 0, 4), Slot(1, "w", 0, 1, 4, 2)]
    return Manifest(
        placement=placement,
        replicas=2,
        optimizer="flat",
        optimizer_class="AdamW",
        slices=(
            SliceManifest(
                stages=(StageSlots((slots[0],), (2,)), StageSlots((slots[1], slots[0]), (3,))),
                numbers=(0, 1),
                shapes={0: {"w": [2, 2]}, 1: {"w": [2]}},
                weights={0: "layer_00-model_states.pt", 1: "layer_01-model_states.pt"},
            ),
        ),
        frozen_excluded=False,
        files={"a": SavedFile(3, "f")},
        state={"micro_steps": 4},
    )


@pytest.mark.parametrize("placement", [CHAIN, V], ids=["chain", "V"])
def test_a_manifest_is_read_as_it_was_written(placement: Placement) -> None:
    written = manifest(placement)
    read = Manifest.from_json(written.to_json())
    assert read == written and read.num_stages == 2 and read.partition == placement.boundaries


def test_the_manifest_of_a_chain_has_no_new_keys() -> None:
    """Earlier versions refuse keys that they do not know."""
    keys = {"format", "partition", "replicas", "optimizer", "optimizer_class", "slices", "frozen_excluded", "files"}
    keys |= {"state", "replicas_differ"}
    assert json.loads(manifest().to_json()).keys() == keys
    assert json.loads(manifest(V).to_json()).keys() == keys | {"partition_owners"}


def test_slots_of_a_v_cover_both_chunks_of_a_stage() -> None:
    """Files are per stage, not per chunk: those of the first stage hold the first and the last layer."""
    stages = [
        StageSlots(tuple(Slot(layer, "w", 0, place, place, 1) for place, layer in enumerate(V.layers_of(stage))))
        for stage in V.stages
    ]
    every = [
        (
            0,
            stage,
            SliceManifest((slots,), (stage,), {}, {layer: f"layer_{layer:02d}" for layer in V.layers_of(stage)}),
        )
        for stage, slots in enumerate(stages)
    ]
    (joined,) = join(every)
    whole = replace(manifest(V), slices=(joined,))
    places = Manifest.from_json(whole.to_json()).slices[0].slots(prefer=0)
    assert {layer: stage for (layer, _), (stage, _) in places.items()} == {0: 0, 1: 1, 2: 1, 3: 0}


def test_a_tied_parameter_is_read_from_the_own_stage_or_the_first() -> None:
    assert [manifest().slices[0].slots(prefer=stage)[0, "w"][0] for stage in (0, 1, 2)] == [0, 1, 0]


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


@pytest.mark.parametrize("change", ["{", "[]", '{"format": 1}', '{"format": 3}', "null"])
def test_an_invalid_manifest_is_refused(change: str) -> None:
    with pytest.raises(ValueError, match=r"it is not a manifest|its format is not 3|Expecting property name"):
        Manifest.from_json(change)


def test_a_manifest_with_stages_unlike_its_partition_is_refused() -> None:
    text = manifest().to_json().replace('3\n ],\n "replicas"', '3, 4\n ],\n "replicas"')
    assert text != manifest().to_json()
    with pytest.raises(ValueError, match="2 stages"):
        Manifest.from_json(text)


def test_a_manifest_with_an_invalid_partition_is_refused() -> None:
    text = manifest().to_json().replace('1,\n  3\n ],\n "replicas"', '0,\n  3\n ],\n "replicas"')
    with pytest.raises(ValueError, match="stage 0 would own no layer"):
        Manifest.from_json(text)
