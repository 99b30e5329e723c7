"""Checkpoints of pipelines with a tensor-parallel ("model") axis: each slice has its files and resumes bitwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from tests.support.checkpoints import (
    attempt,
    check_comes_back,
    check_same,
    exchange_with_stock,
    files_read,
    load_and_continue,
    load_frozen,
    load_stock_weights,
    outcome,
    refuse,
    save_and_come_back,
    save_as,
    save_then_thaw,
    train_on,
)
from tests.support.configs import Case
from tests.support.harness import run
from tests.support.sliced_layers import SLICES, SlicedBlock, sliced_layers
from tests.support.training import build, drop_decision, layers_of, whole

pytestmark = pytest.mark.ranks

SLICED = Case(stages=2, slices=2, blocks=4, clip=0.05, micro_batches=2)


@pytest.mark.parametrize(
    ("case", "stages"),
    [
        pytest.param(replace(SLICED, precision="bf16 zero1", tied=True), 1, id="bf16 zero1"),
        *(
            pytest.param(replace(SLICED, **differs), stages, id=name, marks=pytest.mark.nightly)
            for name, stages, differs in (
                ("fp32", 3, {"tied": True, "groups": "two"}),
                ("bf16", 1, {"precision": "bf16", "groups": "two"}),
                ("replicas", 1, {"precision": "bf16 zero1", "replicas": 2, "groups": "two"}),
            )
        ),
    ],
)
def test_a_run_resumes_at_any_partition(tmp_path: Path, case: Case, stages: int) -> None:
    ranks = run(case.ranks, save_and_come_back, case, str(tmp_path), sliced_layers)
    check_comes_back(case, ranks)
    other = replace(case, stages=stages)
    loaded = run(other.ranks, load_and_continue, other, str(tmp_path), 1, sliced_layers, 2)
    check_same([saved for saved, _ in ranks], loaded)


EXCHANGED = replace(SLICED, precision="bf16 zero1", clip=0.0, groups="two", scheduler=True, tied=True)


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder in which DeepSpeed's engine and ours have saved, and what followed when they loaded it."""
    folder = tmp_path_factory.mktemp("exchanged")
    return folder, run(4, exchange_with_stock, EXCHANGED, str(folder), sliced_layers)


def test_checkpoints_load_in_stock_and_back(exchanged: tuple[Path, list[Any]]) -> None:
    folder, ranks = exchanged
    for rank, ways in enumerate(ranks):
        for way, (expected, loaded) in ways.items():
            assert loaded == expected, (rank, way)
        assert len(ways) == 3
    files = {
        writer: {str(path.relative_to(folder / writer)) for path in (folder / writer).rglob("*") if path.is_file()}
        for writer in ("stock", "ours")
    }
    assert files["stock"] == {name for name in files["ours"] if "dynmo" not in name}
    assert all("-model_0" in name for name in files["ours"] if "dynmo" in name and "manifest" not in name)


@pytest.mark.nightly
def test_checkpoints_in_fp32_load_in_stock_and_back(tmp_path: Path) -> None:
    for ways in run(4, exchange_with_stock, replace(EXCHANGED, precision="fp32"), str(tmp_path), sliced_layers):
        for way, (expected, loaded) in ways.items():
            assert loaded == expected, way
        assert len(ways) == 3


@pytest.mark.nightly
def test_stock_weights_load_at_another_number_of_stages(tmp_path: Path) -> None:
    case = replace(SLICED, clip=0.0)
    run(4, save_as, "stock", case, str(tmp_path), sliced_layers)
    found = [run(2 * n, load_stock_weights, replace(case, stages=n), str(tmp_path), sliced_layers) for n in (1, 2)]
    assert len({str(loss) for losses in found for loss in losses}) == 1


def refuse_another_degree(case: Case, folders: Sequence[str]) -> list[tuple[str, bool]]:
    engine = build(case, sliced_layers)
    return [attempt(engine, folder) for folder in folders]


def test_another_tensor_parallel_degree_is_refused(exchanged: tuple[Path, list[Any]]) -> None:
    folders = [str(exchanged[0] / writer) for writer in ("ours", "stock")]
    for other in (replace(EXCHANGED, stages=1, slices=4), replace(EXCHANGED, slices=1)):
        for found in run(other.ranks, refuse_another_degree, other, folders):
            for (message, unchanged), folder in zip(found, folders, strict=True):
                assert folder in message and unchanged
                assert f"written with 2 tensor-parallel slices, expected {other.slices}" in message


def test_each_slice_reads_its_own_files_once(exchanged: tuple[Path, list[Any]]) -> None:
    (folder,) = (exchanged[0] / "ours").glob("global_step*")
    read = run(2, files_read, replace(EXCHANGED, stages=1), str(folder.parent), sliced_layers)
    written = {str(path.relative_to(folder)) for path in folder.rglob("*layer_*.pt")}
    for place, names in enumerate(read):
        shards = [f"bf16_zero_pp_rank_0_mp_rank_{stage * 2 + place:02d}_optim_states.pt" for stage in (0, 1)]
        assert [name for name in names if "mp_rank" in name] == [*shards, f"mp_rank_{place:02d}_model_states.pt"]
        of_layers = [name for name in names if "layer_" in name]
        assert of_layers == sorted(name for name in written if f"-model_{place:02d}" in name)


def refuse_damages(case: Case, folder: str, hurts: list[tuple[str, str]]) -> tuple[list[tuple[str, bool]], list[float]]:
    engine = build(case, sliced_layers)
    train_on(engine, 0, 1)
    engine.save_checkpoint(folder, tag="good")
    engine.rebalance([0, 1, 6])  # a successful load would move layers
    return refuse(engine, f"{folder}/good", hurts), train_on(engine, 1, 2)


@pytest.mark.nightly
def test_damage_of_one_slice_changes_no_slice(tmp_path: Path) -> None:
    good = tmp_path / "good"
    hurts = [
        ("layer_02-model_01-model_states.pt", "missing"),
        ("mp_rank_03_model_states.pt", "truncated"),
        ("dynmo/layer_04-data_00-model_01.pt", "garbage"),
        ("dynmo/rank-pipe_01-data_00-model_01.pt", str(good / "dynmo/rank-pipe_01-data_00-model_00.pt")),
        ("layer_00-model_01-model_states.pt", str(good / "layer_05-model_01-model_states.pt")),
        ("mp_rank_02_model_states.pt", str(good / "mp_rank_03_model_states.pt")),
    ]
    results = run(4, refuse_damages, SLICED, str(tmp_path), hurts)
    for found, _ in results:
        for (message, unchanged), (file, how) in zip(found, hurts, strict=True):
            assert file in message and unchanged, (file, how, message)
    undisturbed = run(4, refuse_damages, SLICED, str(tmp_path / "whole"), [])
    assert [losses for _, losses in results] == [losses for _, losses in undisturbed]


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
    train_on(engine, 0, 1)
    change(engine)
    train_on(engine, 1, 1)
    engine.save_checkpoint(folder)
    return {**outcome(engine, train_on(engine, 2, 2)), "words": words(engine)}


def load_changed(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case, changing_layers)
    engine.load_checkpoint(folder)
    return {**outcome(engine, train_on(engine, 2, 2)), "words": words(engine)}


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_changed_slices_load_as_they_were_saved(tmp_path: Path, stages: int) -> None:
    saved = run(4, save_changed, SLICED, str(tmp_path))
    case = replace(SLICED, stages=stages)
    loaded = run(case.ranks, load_changed, case, str(tmp_path))
    check_same(saved, loaded)
    kept = [{place: word for found in results for place, word in found["words"].items()} for results in (saved, loaded)]
    assert kept[0] == kept[1] and set(kept[0].values()) == {"", "slice 0", "slice 1"}
