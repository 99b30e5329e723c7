"""Checkpoints of pipelines with a tensor-parallel ("model") axis: each slice has its files and resumes bitwise."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from tests.support.checkpoints import (
    STEPS,
    attempt,
    check_same,
    files_read,
    load_and_continue,
    load_as,
    load_frozen,
    load_stock_weights,
    outcome,
    refuse,
    save_and_continue,
    save_as,
    save_then_thaw,
    train_on,
    train_undisturbed,
)
from tests.support.configs import Case
from tests.support.harness import run
from tests.support.sliced_layers import SLICES, SlicedBlock, sliced_layers
from tests.support.training import build, drop_decision, layers_of, whole

pytestmark = pytest.mark.ranks

SLICED = Case(stages=2, slices=2, blocks=4, clip=0.05)


def load(case: Case, folder: str, dynmo: dict[str, Any] | None = None) -> dict[str, Any]:
    """Load into an engine that has already trained a batch."""
    made = case if dynmo is None else Case(**{**vars(case), "dynmo": dynmo})
    return load_and_continue(made, folder, 1, sliced_layers)


def save_and_resume(case: Case, folder: str, move: Sequence[int]) -> list[dict[str, Any]]:
    """Return the results of a run after a checkpoint, and of runs that resume from it at other partitions."""
    saved = save_and_continue(case, folder, move, sliced_layers)
    return [saved, load(case, folder), load(case, folder, {"enabled": False})]


@pytest.mark.parametrize(
    ("case", "others"),
    [
        pytest.param(replace(SLICED, tied=True, groups="two"), (1,), id="fp32", marks=pytest.mark.nightly),
        pytest.param(replace(SLICED, precision="bf16 zero1", tied=True), (3,), id="bf16 zero1"),
        pytest.param(replace(SLICED, precision="bf16", groups="two"), (1,), id="bf16", marks=pytest.mark.nightly),
        pytest.param(
            replace(SLICED, precision="bf16 zero1", replicas=2, groups="two"),
            (1,),
            id="replicas",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_run_resumes_at_any_partition(tmp_path: Path, case: Case, others: tuple[int, ...]) -> None:
    saved, *resumed = zip(*run(case.ranks, save_and_resume, case, str(tmp_path), [0, 1, 6]))
    for loaded in resumed:
        check_same(list(saved), list(loaded))
    assert [loaded[0]["partition"] for loaded in resumed] == [[0, 1, 6], [0, 3, 6]]
    assert [found["random"] for found in resumed[0]] == [found["random"] for found in saved]
    for stages in others:
        other = replace(case, stages=stages)
        check_same(list(saved), run(other.ranks, load, other, str(tmp_path)))


def between_stock_and_ours(case: Case, folder: str) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Return, per writer and reader, the writer's results after saving, and the reader's after loading."""
    saved = {}
    for writer in ("stock", "ours", "moved and back"):
        saved[writer] = save_as(writer, case, os.path.join(folder, writer), sliced_layers)
    pairs = (("stock", "ours"), ("ours", "stock"), ("moved and back", "stock"))
    return {
        (writer, reader): (
            saved[writer],
            load_as(reader, case, os.path.join(folder, writer), sliced_layers)[:2],
        )
        for writer, reader in pairs
    }


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16 zero1"])
def test_checkpoints_load_in_stock_and_back(tmp_path: Path, precision: str) -> None:
    case = replace(SLICED, precision=precision, clip=0.0, groups="two", scheduler=True, tied=True)
    for rank, ways in enumerate(run(4, between_stock_and_ours, case, str(tmp_path))):
        for way, (saved, loaded) in ways.items():
            assert loaded == saved, (rank, way)
        assert len(ways) == 3
    files = {
        writer: {str(path.relative_to(tmp_path / writer)) for path in (tmp_path / writer).rglob("*") if path.is_file()}
        for writer in ("stock", "ours")
    }
    assert files["stock"] == {name for name in files["ours"] if "dynmo" not in name}
    assert all("-model_0" in name for name in files["ours"] if "dynmo" in name and "manifest" not in name)


@pytest.mark.nightly
def test_stock_weights_load_at_another_number_of_stages(tmp_path: Path) -> None:
    case = replace(SLICED, clip=0.0)
    run(4, save_as, "stock", case, str(tmp_path), sliced_layers)
    found = [run(2 * n, load_stock_weights, replace(case, stages=n), str(tmp_path), sliced_layers) for n in (1, 2)]
    assert len({str(loss) for losses in found for loss in losses}) == 1


def refuse_another_degree(case: Case, folders: Sequence[str]) -> list[tuple[str, bool]]:
    engine = build(case, sliced_layers)
    return [attempt(engine, folder) for folder in folders]


def test_another_tensor_parallel_degree_is_refused(tmp_path: Path) -> None:
    folders = [str(tmp_path / writer) for writer in ("ours", "stock")]
    for writer, folder in zip(("ours", "stock"), folders):
        run(4, save_as, writer, SLICED, folder, sliced_layers)
    for other in (replace(SLICED, stages=1, slices=4), replace(SLICED, slices=1)):
        for found in run(other.ranks, refuse_another_degree, other, folders):
            for (message, unchanged), folder in zip(found, folders):
                assert folder in message and unchanged
                assert f"written with 2 tensor-parallel slices, expected {other.slices}" in message


def test_each_slice_reads_its_own_files_once(tmp_path: Path) -> None:
    run(4, save_and_continue, SLICED, str(tmp_path), [0, 2, 6], sliced_layers)
    read = run(2, files_read, replace(SLICED, stages=1), str(tmp_path), sliced_layers)
    for place, names in enumerate(read):
        stages = [name for name in names if name.startswith("mp_rank")]
        assert stages == [f"mp_rank_{stage * 2 + place:02d}_model_states.pt" for stage in (0, 1)]
        layers = [name for name in names if name not in stages]
        assert len(layers) == 12 == len(set(layers))  # six of DeepSpeed's and six of ours
        assert all(f"-model_{place:02d}" in name for name in layers)


@pytest.mark.nightly
def test_damage_of_one_slice_changes_no_slice(tmp_path: Path) -> None:
    run(4, save_and_continue, SLICED, str(tmp_path), None, sliced_layers)
    good = tmp_path / f"global_step{STEPS}"
    hurts = [
        ("layer_02-model_01-model_states.pt", "missing"),
        ("mp_rank_03_model_states.pt", "truncated"),
        ("dynmo/layer_04-data_00-model_01.pt", "garbage"),
        ("dynmo/rank-pipe_01-data_00-model_01.pt", str(good / "dynmo/rank-pipe_01-data_00-model_00.pt")),
        ("layer_00-model_01-model_states.pt", str(good / "layer_05-model_01-model_states.pt")),
        ("mp_rank_02_model_states.pt", str(good / "mp_rank_03_model_states.pt")),
    ]
    (tmp_path / "copies").mkdir()
    start = replace(SLICED, start=(0, 1, 6))  # a successful load would move layers
    results = run(4, refuse, start, str(good), str(tmp_path / "copies"), hurts, sliced_layers)
    for found in results:
        for (message, unchanged), (file, how) in zip(found, hurts):
            assert file in message and unchanged, (file, how, message)
    undisturbed = run(4, train_undisturbed, start, sliced_layers)
    assert [found[-1][0] for found in results] == undisturbed


@pytest.mark.nightly
def test_frozen_layers_get_their_state_back(tmp_path: Path) -> None:
    case = replace(SLICED, precision="bf16 zero1", groups="two")
    saved = run(4, save_then_thaw, case, str(tmp_path), 3, [0, 2, 6], sliced_layers)
    loaded = run(2, load_frozen, replace(case, stages=1), str(tmp_path), sliced_layers)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


class SlicedChanging(SlicedBlock):
    """A sliced block that can be narrowed, can get one more split parameter, and holds a word of its slice."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.word = ""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        return hidden * self.gain.mean() if "gain" in self._parameters else hidden


def changing_layers(case: Case) -> list[Any]:
    first, *blocks, last = sliced_layers(case)
    return [first, *(LayerSpec(SlicedChanging, index) for index in range(len(blocks))), last]


def change(engine: Any) -> None:
    """Take different numbers of columns from slices, and give only slice 1 one more split parameter."""
    groups, mine = engine.basic_optimizer.param_groups, SLICES["index"]
    for index, layer in layers_of(engine).items():
        if not isinstance(layer, SlicedChanging) or index % 2 == 0:
            continue
        layer.word = f"slice {mine}"
        kept = 2 + mine
        for name, values in (("up", layer.up[:kept]), ("down", layer.down[:, :kept])):
            old, new = getattr(layer, name), nn.Parameter(values.detach().clone())
            new.model_parallel = True  # type: ignore[attr-defined]
            setattr(layer, name, new)
            engine.basic_optimizer.state.pop(old, None)
            for group in groups:
                group["params"] = [new if member is old else member for member in group["params"]]
        layer.gain = nn.Parameter(torch.full_like(layer.up[0], 0.9))
        layer.gain.model_parallel = True  # type: ignore[attr-defined]
        groups[0]["params"].append(layer.gain)
    engine.model_changed("pruned")
    drop_decision(engine)


def words(engine: Any) -> dict[tuple[int, int], str]:
    """Return the words by slice and layer."""
    modules = layers_of(engine).items()
    return {(SLICES["index"], i): layer.word for i, layer in modules if isinstance(layer, SlicedChanging)}


def save_changed(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case, changing_layers)
    train_on(engine, 0)
    change(engine)
    train_on(engine, STEPS, 1)
    engine.save_checkpoint(folder)
    return {**outcome(engine, train_on(engine, STEPS + 1)), "words": words(engine)}


def load_changed(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case, changing_layers)
    engine.load_checkpoint(folder)
    return {**outcome(engine, train_on(engine, STEPS + 1)), "words": words(engine)}


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_changed_slices_load_as_they_were_saved(tmp_path: Path, stages: int) -> None:
    saved = run(4, save_changed, SLICED, str(tmp_path))
    case = replace(SLICED, stages=stages)
    loaded = run(case.ranks, load_changed, case, str(tmp_path))
    check_same(saved, loaded)
    kept = [{place: word for found in results for place, word in found["words"].items()} for results in (saved, loaded)]
    assert kept[0] == kept[1] and set(kept[0].values()) == {"", "slice 0", "slice 1"}
