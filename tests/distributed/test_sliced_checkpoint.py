"""Checkpoints of pipelines with a tensor-parallel ("model") axis: each slice has its own files, and goes on bitwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed import checkpoint_workloads, topology_workloads
from tests.distributed import sliced_checkpoint_workloads as work
from tests.distributed.harness import run
from tests.distributed.test_bitwise import whole
from tests.distributed.test_checkpoint import check_same
from tests.distributed.workloads import Case

STEPS = work.STEPS
SLICED = Case(stages=2, slices=2, blocks=4, clip=0.05)
LAYERS = topology_workloads.sliced_layers


@pytest.mark.parametrize(
    ("case", "others"),
    [
        pytest.param(replace(SLICED, tied=True, groups="two"), (1,), id="fp32"),
        pytest.param(replace(SLICED, precision="bf16 zero1", tied=True), (3,), id="bf16 zero1"),
        pytest.param(replace(SLICED, precision="bf16", groups="two"), (1,), id="bf16", marks=pytest.mark.fuzz),
        pytest.param(
            replace(SLICED, precision="bf16 zero1", replicas=2, groups="two"),
            (1,),
            id="replicas",
            marks=pytest.mark.fuzz,
        ),
    ],
)
def test_a_run_goes_on_at_any_partition(tmp_path: Path, case: Case, others: tuple[int, ...]) -> None:
    saved, *resumed = zip(*run(case.ranks, work.save_and_resume, case, str(tmp_path), [0, 1, 6]))
    for loaded in resumed:
        check_same(list(saved), list(loaded))
    assert [loaded[0]["partition"] for loaded in resumed] == [[0, 1, 6], [0, 3, 6]]
    assert [found["random"] for found in resumed[0]] == [found["random"] for found in saved]
    for stages in others:
        other = replace(case, stages=stages)
        check_same(list(saved), run(other.ranks, work.load, other, str(tmp_path)))


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.fuzz), "bf16 zero1"])
def test_stock_both_ways(tmp_path: Path, precision: str) -> None:
    case = replace(SLICED, precision=precision, clip=0.0, groups="two", scheduler=True, tied=True)
    for rank, ways in enumerate(run(4, work.between_stock_and_ours, case, str(tmp_path))):
        for way, (saved, loaded) in ways.items():
            assert loaded == saved, (rank, way)
        assert len(ways) == 3
    files = {
        writer: {str(path.relative_to(tmp_path / writer)) for path in (tmp_path / writer).rglob("*") if path.is_file()}
        for writer in ("stock", "ours")
    }
    assert files["stock"] == {name for name in files["ours"] if "dynmo" not in name}
    assert all("-model_0" in name for name in files["ours"] if "dynmo" in name and "manifest" not in name)


def test_weights_of_stock_at_another_number_of_stages(tmp_path: Path) -> None:
    case = replace(SLICED, clip=0.0)
    run(4, checkpoint_workloads.save_as, "stock", case, str(tmp_path), LAYERS)
    found = [
        run(2 * n, checkpoint_workloads.load_stock_weights, replace(case, stages=n), str(tmp_path), LAYERS)
        for n in (1, 2)
    ]
    assert len({str(loss) for losses in found for loss in losses}) == 1


def test_another_tensor_parallel_degree_is_refused(tmp_path: Path) -> None:
    folders = [str(tmp_path / writer) for writer in ("ours", "stock")]
    for writer, folder in zip(("ours", "stock"), folders):
        run(4, checkpoint_workloads.save_as, writer, SLICED, folder, LAYERS)
    for other in (replace(SLICED, stages=1, slices=4), replace(SLICED, slices=1)):
        for found in run(other.ranks, work.refuse_another_degree, other, folders):
            for (message, unchanged), folder in zip(found, folders):
                assert folder in message and unchanged
                assert f"written with 2 tensor-parallel slices, expected {other.slices}" in message


def test_each_slice_reads_its_own_files_once(tmp_path: Path) -> None:
    run(4, checkpoint_workloads.save_and_go_on, SLICED, str(tmp_path), [0, 2, 6], LAYERS)
    read = run(2, checkpoint_workloads.what_is_read, replace(SLICED, stages=1), str(tmp_path), LAYERS)
    for place, names in enumerate(read):
        stages = [name for name in names if name.startswith("mp_rank")]
        assert stages == [f"mp_rank_{stage * 2 + place:02d}_model_states.pt" for stage in (0, 1)]
        layers = [name for name in names if name not in stages]
        assert len(layers) == 12 == len(set(layers))  # six of DeepSpeed's and six of ours
        assert all(f"-model_{place:02d}" in name for name in layers)


def test_damage_of_one_slice_changes_none(tmp_path: Path) -> None:
    run(4, checkpoint_workloads.save_and_go_on, SLICED, str(tmp_path), None, LAYERS)
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
    start = replace(SLICED, start=(0, 1, 6))  # it would go elsewhere
    results = run(4, checkpoint_workloads.refuse, start, str(good), str(tmp_path / "copies"), hurts, LAYERS)
    for found in results:
        for (message, unchanged), (file, how) in zip(found, hurts):
            assert file in message and unchanged, (file, how, message)
    undisturbed = run(4, checkpoint_workloads.train_undisturbed, start, LAYERS)
    assert [found[-1][0] for found in results] == undisturbed


def test_frozen_state_comes_back(tmp_path: Path) -> None:
    case = replace(SLICED, precision="bf16 zero1", groups="two")
    saved = run(4, checkpoint_workloads.save_then_thaw, case, str(tmp_path), 3, [0, 2, 6], LAYERS)
    loaded = run(2, checkpoint_workloads.load_frozen, replace(case, stages=1), str(tmp_path), LAYERS)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


@pytest.mark.parametrize("stages", [1, 2])
def test_slices_load_as_what_they_had_become(tmp_path: Path, stages: int) -> None:
    saved = run(4, work.save_changed, SLICED, str(tmp_path))
    case = replace(SLICED, stages=stages)
    loaded = run(case.ranks, work.load_changed, case, str(tmp_path))
    check_same(saved, loaded)
    kept = [{place: word for found in results for place, word in found["words"].items()} for results in (saved, loaded)]
    assert kept[0] == kept[1] and set(kept[0].values()) == {"", "slice 0", "slice 1"}
