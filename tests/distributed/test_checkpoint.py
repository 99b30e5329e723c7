"""A run that goes on from a checkpoint, at whatever partition, is bitwise the run that never stopped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import checkpoint_workloads as work
from tests.distributed import workloads
from tests.distributed.harness import RankError, run
from tests.distributed.test_bitwise import whole
from tests.distributed.workloads import Case

STEPS = work.STEPS


def skewed(stages: int, num_layers: int = 8) -> list[int]:
    """As many layers as possible on the last stage."""
    return [*range(stages), num_layers]


def check_same(saved: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)
    assert loaded[0]["steps"] == saved[0]["steps"]
    assert loaded[0]["lr"] == saved[0]["lr"]


@pytest.mark.parametrize(
    ("precision", "tied", "stages"),
    [
        *(("fp32", True, stages) for stages in (1, 2, 3, 4)),
        *(("bf16 zero1", True, stages) for stages in (2, 3)),
        *(pytest.param("bf16 zero1", True, stages, marks=pytest.mark.fuzz) for stages in (1, 4)),
        *(pytest.param("fp32", False, stages, marks=pytest.mark.fuzz) for stages in (1, 2, 3, 4)),
    ],
)
def test_every_number_of_stages_to_every_other(tmp_path: Path, stages: int, precision: str, tied: bool) -> None:
    case = Case(stages=stages, tied=tied, clip=0.05, precision=precision)
    move = skewed(stages) if stages > 1 else None
    saved = run(case.ranks, work.save_and_go_on, case, str(tmp_path), move)
    for other in (1, 2, 3, 4):
        loaded = run(other, work.load_and_go_on, replace(case, stages=other), str(tmp_path))
        check_same(saved, loaded)
        assert loaded[0]["partition"] == (saved[0]["partition"] if other == stages else [0, *_uniform(other)])
        assert loaded[0]["client"] == {"epoch": 4, "best": [1.5]}
        if other == stages:
            assert [r["random"] for r in loaded] == [r["random"] for r in saved]


def _uniform(stages: int) -> list[int]:
    from ds_dynmo import partitioners

    return list(partitioners.uniform(8, stages))[1:]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(stages=3, groups="sparse", scheduler=True), id="sparse groups"),
        pytest.param(Case(stages=2, groups="two", scheduler=True, tied=True), id="two groups, tied"),
        pytest.param(Case(stages=3, optimizer="SGD"), id="SGD"),
        pytest.param(Case(stages=3, optimizer="Adafactor"), id="Adafactor"),
        pytest.param(Case(stages=2, replicas=2, clip=0.05), id="replicas"),
        pytest.param(Case(stages=3, groups="two", precision="bf16", scheduler=True), id="bf16"),
        pytest.param(Case(stages=2, groups="two", replicas=2, precision="bf16 zero1 fp32sums"), id="fp32 sums"),
        pytest.param(Case(stages=2, groups="two", replicas=2, precision="fp32 zero1", tied=True), id="fp32 zero1"),
    ],
)
def test_into_an_engine_that_trained_elsewhere(tmp_path: Path, case: Case) -> None:
    saved = run(case.ranks, work.save_and_go_on, case, str(tmp_path), skewed(case.stages))
    loaded = run(case.ranks, work.load_and_go_on, case, str(tmp_path), 2)
    check_same(saved, loaded)
    assert [r["random"] for r in loaded] == [r["random"] for r in saved]
    assert loaded[0]["partition"] == skewed(case.stages)
    assert loaded[0]["settled"] == saved[0]["settled"]


def test_when_to_profile_and_decide_goes_on(tmp_path: Path) -> None:
    case = Case(stages=2)
    saved = run(2, work.save_and_go_on, case, str(tmp_path))
    loaded = run(2, work.load_and_go_on, case, str(tmp_path), 1)
    assert loaded[0]["settled"] == saved[0]["settled"] == 2 * STEPS


def test_switched_off_it_stays_where_it_is(tmp_path: Path) -> None:
    case = Case(stages=2)
    saved = run(2, work.save_and_go_on, case, str(tmp_path), skewed(2))
    loaded = run(2, work.load_and_go_on, replace(case, dynmo={"enabled": False}), str(tmp_path))
    check_same(saved, loaded)
    assert loaded[0]["partition"] == [0, 4, 8] and saved[0]["partition"] == [0, 1, 8]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_replicas(tmp_path: Path, before: int, after: int) -> None:
    case = Case(stages=2, replicas=before, tied=True)
    run(case.ranks, work.save_and_go_on, case, str(tmp_path), skewed(2))
    case = replace(case, replicas=after)
    ways = [
        run(case.ranks, work.load_and_go_on, replace(case, start=start), str(tmp_path)) for start in (None, (0, 6, 8))
    ]
    check_same(*ways)


@pytest.mark.parametrize("make_layers", [work.all_wrapped_ties, work.tie_without_functions])
@pytest.mark.parametrize("stages", [1, 3])
def test_ties_of_every_kind(tmp_path: Path, make_layers: Any, stages: int) -> None:
    case = Case(stages=2, clip=0.05)
    saved = run(2, work.save_and_go_on, case, str(tmp_path), None, make_layers)
    loaded = run(stages, work.load_and_go_on, replace(case, stages=stages), str(tmp_path), 0, make_layers)
    check_same(saved, loaded)


# -- wrapped optimizers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "before", "after"),
    [
        pytest.param(precision, *sizes, marks=() if number == turn or turn == 1 else pytest.mark.fuzz)
        for turn, precision in enumerate(("bf16", "bf16 zero1", "fp32 zero1"))
        for number, sizes in enumerate(((1, 2), (2, 1), (2, 3)))
    ],
)
def test_shards_of_another_number_of_replicas(tmp_path: Path, precision: str, before: int, after: int) -> None:
    case = Case(stages=2, replicas=before, precision=precision, groups="two", tied=True)
    saved = run(case.ranks, work.state_after_loading, case, str(tmp_path), True)
    case = replace(case, replicas=after, stages=1 if after == 3 else 2)
    assert whole(run(case.ranks, work.state_after_loading, case, str(tmp_path), False)) == whole(saved)


@pytest.mark.parametrize("precision", ["bf16", "bf16 zero1"])
@pytest.mark.parametrize("stages", [1, 2])
def test_frozen_state_comes_back(tmp_path: Path, precision: str, stages: int) -> None:
    case = Case(stages=2, precision=precision, groups="two", clip=0.05)
    saved = run(2, work.save_then_thaw, case, str(tmp_path), 3, [0, 2, 8])
    loaded = run(stages, work.load_frozen, replace(case, stages=stages), str(tmp_path))
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


@pytest.mark.parametrize("precision", ["bf16", "fp32 zero1"])
def test_weights_alone_under_a_wrapper(tmp_path: Path, precision: str) -> None:
    case = Case(stages=2, precision=precision)
    run(2, work.save_and_go_on, case, str(tmp_path), skewed(2))
    for result in run(2, work.load_weights_only, case, str(tmp_path)):
        assert result["masters"]
        for key, (_, master) in result["masters"].items():
            weights = torch.frombuffer(bytearray(result["weights"][key.removesuffix("/master")]), dtype=torch.uint8)
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            assert weights.view(dtype).float().numpy().tobytes() == master
        assert result["losses"][1] < result["losses"][0] + 1


def test_weights_of_another_shape_leave_the_state_of_the_others(tmp_path: Path) -> None:
    run(2, work.save_narrowed_tie, Case(stages=2), str(tmp_path))
    case = Case(stages=2, replicas=2, precision="bf16 zero1", groups="two")
    results = run(case.ranks, work.weights_onto_moments, case, str(tmp_path))
    before, after = (whole([{**found, "state": found[when]} for found in results]) for when in ("before", "after"))
    assert before.keys() == after.keys()
    assert {key.partition("/")[2] for key in before} == {"", "group", "master", "exp_avg", "exp_avg_sq", "step"}
    assert {"1.weight/exp_avg", "1.back/exp_avg"} <= before.keys()
    for key, value in before.items():
        layer, _, kind = key.partition("/")
        if layer in ("1.weight", "1.back") and kind.startswith("exp_avg"):
            assert len(after[key]) == len(value) // 2 and not any(after[key])
        elif kind.startswith("exp_avg"):
            assert after[key] == value and any(value), key
        elif kind == "step":
            assert after[key] == value
        elif kind == "master":
            weights = torch.frombuffer(bytearray(after[layer]), dtype=torch.bfloat16)
            assert workloads.raw(weights.float()) == after[key]
    assert {str(dtype) for found in results for dtype in found["dtypes"]} == {"torch.bfloat16"}
    assert all(0 < loss < 5 for found in results for loss in found["losses"])


def test_weights_of_another_precision(tmp_path: Path) -> None:
    ways = [("bf16 buffers", "fp32"), ("fp32", "bf16 buffers")]
    results = run(2, work.other_precisions, str(tmp_path), ways)
    assert [[exact for _, exact, _ in result] for result in results] == [[torch.float64] * 2, [None] * 2]
    for result in results:
        dtypes, _, losses = zip(*result)
        assert dtypes == ({torch.float32}, {torch.bfloat16})
        assert all(0 < loss < 5 for found in losses for loss in found)


def test_stock_with_a_group_that_no_stage_uses(tmp_path: Path) -> None:
    for stock, ours in run(2, work.stock_with_an_empty_group, Case(precision="bf16 zero1", clip=0.0), str(tmp_path)):
        assert stock == ours


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.fuzz), True])
def test_deepspeeds_universal_conversion(tmp_path: Path, tied: bool) -> None:
    case = Case(stages=2, replicas=2, precision="bf16 zero1", tied=tied, groups="two")
    results = run(4, work.save_for_conversion, case, str(tmp_path))
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
    folders = ["--input_folder", str(tmp_path / "now"), "--output_folder", str(tmp_path / "universal")]
    done = subprocess.run([*command, *folders, "--num_merge_workers", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(results)
    for key, value in {key: value for result in results for key, value in result.items()}.items():
        name, _, kind = key.rpartition("/")
        converted = torch.load(tmp_path / "universal" / "zero" / name / f"{kind}.pt", weights_only=True)
        assert workloads.raw(converted["param"]) == value, key


@pytest.mark.parametrize("precision", ["bf16", "bf16 zero1"])
def test_placeholders_reach_no_file(tmp_path: Path, precision: str) -> None:
    case = Case(stages=4, precision=precision, groups="two", start=(0, 1, 6, 7, 8))  # embedding, blocks, function, head
    assert run(4, work.files_hold_no_placeholder, case, str(tmp_path))[0] == []


@pytest.mark.parametrize(
    ("precision", "writer", "reader"),
    [
        ("bf16", "stock", "ours"),  # stock DeepSpeed 0.19.8 fails to load its own of this kind: KeyError
        *((precision, "stock", "ours") for precision in ("bf16 zero1", "fp32 zero1")),
        *((precision, "ours", "stock") for precision in ("bf16 zero1", "fp32 zero1")),
        *((precision, "moved and back", "stock") for precision in ("bf16 zero1", "fp32 zero1")),
    ],
)
def test_stock_both_ways_under_a_wrapper(tmp_path: Path, writer: str, reader: str, precision: str) -> None:
    case = Case(stages=2, clip=0.0, groups="two", scheduler=True, precision=precision)
    saved = run(2, work.save_as, writer, case, str(tmp_path))
    loaded = run(2, work.load_as, reader, case, str(tmp_path))
    assert [found[:2] for found in loaded] == saved


# -- stock DeepSpeed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("writer", "reader"), [("stock", "ours"), ("ours", "stock"), ("moved and back", "stock")])
def test_stock_both_ways(tmp_path: Path, writer: str, reader: str, tied: bool) -> None:
    case = Case(stages=2, tied=tied, clip=0.0, groups="two", scheduler=True)
    saved = run(2, work.save_as, writer, case, str(tmp_path))
    loaded = run(2, work.load_as, reader, case, str(tmp_path))
    assert [found[:2] for found in loaded] == saved
    assert [found[2:] for found in loaded] == [(2 * STEPS, 4)] * 2


def test_stock_reads_what_stock_would_have_written(tmp_path: Path) -> None:
    case = Case(stages=2, clip=0.0)
    for which in ("stock", "ours"):
        run(2, work.save_as, which, case, str(tmp_path / which))
    names = {which: _files(tmp_path / which) for which in ("stock", "ours")}
    assert names["stock"] == {name for name in names["ours"] if "dynmo" not in name}
    for name in names["stock"] - {"latest"}:
        stock, ours = (torch.load(tmp_path / which / name, weights_only=True) for which in ("stock", "ours"))
        if "ds_config" in stock:
            stock.pop("ds_config"), ours.pop("ds_config")
        assert plain(stock) == plain(ours), name


def plain(value: Any) -> Any:
    """What a file holds, tensors as dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, workloads.raw(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_stock_loads_where_layers_had_moved(tmp_path: Path) -> None:
    """Ours goes back to the partition that its module was built with, which is what stock wrote."""
    case = Case(stages=2, clip=0.0)
    saved = run(2, work.save_as, "stock", case, str(tmp_path))
    loaded = run(2, work.load_as, "ours", replace(case, start=(0, 1, 8)), str(tmp_path))
    assert [found[:2] for found in loaded] == saved


def test_stock_of_other_stages_is_refused_but_for_weights(tmp_path: Path) -> None:
    case = Case(stages=2, clip=0.0)
    run(2, work.save_as, "stock", case, str(tmp_path))
    with pytest.raises(RankError, match=r"CheckpointError.*stage files.*mp_rank_01.*expected.*mp_rank_02"):
        run(3, work.load_as, "ours", replace(case, stages=3), str(tmp_path))
    assert (
        len({str(run(n, work.load_stock_weights, replace(case, stages=n), str(tmp_path))[0]) for n in (1, 2, 3)}) == 1
    )


# -- layers that changed ------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "trained"), [(1, 0), (2, 0), (2, 2), (3, 0)])
def test_layers_load_as_what_they_had_become(tmp_path: Path, stages: int, trained: int) -> None:
    case = Case(stages=2, groups="two")
    saved = run(2, work.save_changed, case, str(tmp_path))
    loaded = run(stages, work.load_changed, replace(case, stages=stages), str(tmp_path), 0.5, trained)
    kept = [
        {index: value for result in results for index, value in result["kept"].items()} for results in (saved, loaded)
    ]
    assert kept[0] == kept[1] and len(kept[0]) == 5
    check_same(saved, loaded)


def test_replicas_keep_what_is_their_own(tmp_path: Path) -> None:
    case = Case(stages=2, replicas=2, groups="two")
    saved = run(4, work.save_changed, case, str(tmp_path))
    loaded = run(4, work.load_changed, case, str(tmp_path), 0.5, 1)
    kept = [result["kept"] for result in saved]
    assert kept[0] != kept[1] and kept[0].keys() == kept[1].keys()
    assert [result["kept"] for result in loaded] == kept
    assert [result["losses"] for result in loaded] == [result["losses"] for result in saved]
    assert [result["state"] for result in loaded] == [result["state"] for result in saved]


def test_what_did_not_change_belongs_to_the_code(tmp_path: Path) -> None:
    case = Case(stages=2, groups="two")
    run(2, work.save_changed, case, str(tmp_path))
    loaded = run(2, work.load_changed, case, str(tmp_path), 0.25, 0)
    kept = {index: value for result in loaded for index, value in result["kept"].items()}
    assert {value[4] for value in kept.values()} == {0.25}
    assert all(value[2] > 0 for value in kept.values()) and len(kept) == 5


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_tied_layer_of_another_shape(tmp_path: Path, stages: int) -> None:
    saved = run(2, work.save_narrowed_tie, Case(stages=2), str(tmp_path))
    check_same(saved, run(stages, work.load_and_go_on, Case(stages=stages), str(tmp_path), 1, work.tied_tapered))


def test_frozen_layers_left_out(tmp_path: Path) -> None:
    case = Case(stages=2)
    saved = run(2, work.save_frozen, case, str(tmp_path))
    assert not torch.load(tmp_path / f"global_step{STEPS}" / "layer_00-model_states.pt")
    for stages in (2, 3):
        check_same(saved, run(stages, work.load_and_go_on, replace(case, stages=stages), str(tmp_path)))


# -- files that are not what they should be -----------------------------------------------------------


def test_damage_is_named_and_changes_nothing(tmp_path: Path) -> None:
    case = Case(stages=2)
    for name, seed in (("good", 0), ("other", 1)):
        run(2, work.save_and_go_on, replace(case, blocks=5 + seed), str(tmp_path / name), None)
    run(2, work.save_and_go_on, replace(case, clip=0.01), str(tmp_path / "same"), None)
    good, other, same = (str(tmp_path / name / f"global_step{STEPS}") for name in ("good", "other", "same"))
    files = ["layer_03-model_states.pt", "mp_rank_01_model_states.pt", "dynmo/layer_05-data_00-model_00.pt"]
    files += ["dynmo/rank-pipe_01-data_00-model_00.pt", "dynmo/manifest.json"]
    hurts = [(file, how) for file in files for how in ("missing", "truncated", "garbage")]
    hurts += [("mp_rank_00_model_states.pt", "evil")]
    hurts += [(file, f"{where}/{file}") for file in files[:2] for where in (other, same)]
    hurts += [("dynmo/manifest.json", f"{other}/dynmo/manifest.json")]
    (tmp_path / "copies").mkdir()
    start = replace(case, start=(0, 3, 8))  # it would go elsewhere
    results = run(2, work.refuse, start, good, str(tmp_path / "copies"), hurts)
    for found in results:
        for (message, unchanged), (file, how) in zip(found, hurts):
            assert file in message and unchanged, (file, how, message)
    assert [found[-1][0] for found in results] == run(2, work.train_undisturbed, start)


def test_a_malicious_pickle_is_refused(tmp_path: Path) -> None:
    case = Case(stages=1)
    run(1, work.save_as, "stock", case, str(tmp_path))
    (tmp_path / "copies").mkdir()
    hurts = [("mp_rank_00_model_states.pt", "evil"), ("layer_00-model_states.pt", "evil")]
    found = run(1, work.refuse, case, str(tmp_path / f"global_step{STEPS}"), str(tmp_path / "copies"), hurts)[0]
    for (message, unchanged), (file, _) in zip(found, hurts):
        assert file in message and "could run code" in message and unchanged
    assert not list(tmp_path.rglob("evil"))


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    case = Case(stages=2)
    run(2, work.save_and_go_on, case, str(tmp_path), None)
    for other, message in (
        (replace(case, blocks=6), "a model of 8 layers, expected 9"),
        (replace(case, tied=True), "layer 7 has parameters .* there, expected none"),
        (replace(case, optimizer="SGD"), "AdamW.*expected SGD"),
        (replace(case, groups="two"), "has 1 parameter groups, expected 2"),
    ):
        with pytest.raises(RankError, match=f"CheckpointError.*{message}"):
            run(2, work.load_and_go_on, other, str(tmp_path))


@pytest.mark.parametrize("precision", ["bf16", "bf16 zero1"])
def test_flat_buffers_of_other_groups_are_refused(tmp_path: Path, precision: str) -> None:
    """Before anything changes."""
    cases = [Case(stages=2, precision=precision, groups=groups) for groups in ("one", "two")]
    for case, folder in zip(cases, ("one", "two")):
        run(2, work.save_as, "ours", case, str(tmp_path / folder))
    for case, folder, counts in ((cases[1], "one", (1, 2)), (cases[0], "two", (2, 1))):
        with pytest.raises(RankError, match="flat-pipe_0.*has {} parameter groups, expected {}".format(*counts)):
            run(2, work.load_and_go_on, case, str(tmp_path / folder))


# -- writing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("tags", [["one", "two"], ["one", "one"], ["one", "two", "one"]], ids="-".join)
def test_a_kill_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path, tags: list[str], every: int) -> None:
    *wrong, (steps, _) = run(1, work.kill_everywhere, str(tmp_path), tags, every)[0]
    assert not wrong
    assert steps > 20


@pytest.mark.parametrize(("rank", "step"), [(0, 3), (1, 2), (0, 12)])
def test_a_rank_that_dies_while_writing(tmp_path: Path, rank: int, step: int) -> None:
    case = Case(stages=2)
    with pytest.raises(RankError, match="died"):
        run(2, work.save_twice_and_die, case, str(tmp_path), rank, step)
    saved = run(2, work.save_and_go_on, case, str(tmp_path / "reference"))
    check_same(saved, run(2, work.load_and_go_on, case, str(tmp_path)))


def test_a_failure_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    case = Case(stages=2)
    results = run(2, work.save_fails, case, str(tmp_path))
    for message, _ in results:
        assert "rank 1: OSError: No space left" in message and "could run code" in message and "mp_rank_00" in message
        assert "neither what it was nor what was saved: rank 1: IndexError" in message
    saved = run(2, work.save_and_go_on, case, str(tmp_path / "reference"))
    check_same(saved, [found for _, found in results])


# -- the rest -----------------------------------------------------------------------------------------


def test_each_rank_reads_what_it_needs(tmp_path: Path) -> None:
    case = Case(stages=4)
    run(4, work.save_and_go_on, case, str(tmp_path))
    read = run(2, work.what_is_read, replace(case, stages=2), str(tmp_path))
    stages = [[name for name in names if "mp_rank" in name] for names in read]
    assert stages == [
        ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"],
        ["mp_rank_00_model_states.pt", "mp_rank_02_model_states.pt", "mp_rank_03_model_states.pt"],
    ]
    layers = [{int(name.partition("layer_")[2][:2]) for name in names if "layer_" in name} for names in read]
    assert layers == [{0, 1, 2, 3}, {4, 5, 7}]


def test_parts(tmp_path: Path) -> None:
    case = Case(stages=2, scheduler=True)
    run(2, work.save_and_go_on, case, str(tmp_path))
    expected = {"weights": True, "moments": True, "steps": STEPS, "scheduler": STEPS - 1}
    for flags, changed in (
        ({}, {}),
        ({"load_optimizer_states": False}, {"moments": False}),
        ({"load_lr_scheduler_states": False}, {"scheduler": -1}),
        ({"load_module_only": True}, {"moments": False, "steps": 0, "scheduler": -1}),
    ):
        found = run(2, _parts, case, str(tmp_path), flags)
        assert found == [{**expected, **changed}] * 2, flags


def _parts(case: Case, folder: str, flags: dict[str, Any]) -> dict[str, Any]:
    return work.parts(case, folder, **flags)


def test_misuse(tmp_path: Path) -> None:
    found = run(2, work.misuse, Case(stages=2), str(tmp_path))[1]
    assert "'a/b': has to be the name of one folder" in found[0]
    assert "name different checkpoints" in found[1]
    assert "nowhere: there is no such folder" in found[2]
    assert "different tags" in found[3]
    assert "custom_load_fn" in found[4]
    assert found[5] == "True"
    assert not os.listdir(tmp_path)


def test_replicas_that_share_the_writing(tmp_path: Path) -> None:
    case = Case(stages=2, replicas=2)
    saved = run(4, work.save_in_parallel, case, str(tmp_path))
    check_same(saved, run(4, work.load_and_go_on, case, str(tmp_path)))


def test_a_checkpoint_can_be_copied_elsewhere(tmp_path: Path) -> None:
    case = Case(stages=2)
    saved = run(2, work.save_and_go_on, case, str(tmp_path / "a"))
    shutil.move(tmp_path / "a" / f"global_step{STEPS}", tmp_path / "renamed")
    check_same(saved, run(2, _load_tag, case, str(tmp_path), "renamed"))


def _load_tag(case: Case, folder: str, tag: str) -> dict[str, Any]:
    return work.load_and_go_on(case, folder, tag=tag)


def test_without_a_block_it_is_deepspeeds(tmp_path: Path) -> None:
    case = Case(stages=2, clip=0.0, dynmo=None)
    assert run(2, _save_without_block, case, str(tmp_path)) == [True, True]
    assert not list(tmp_path.rglob("dynmo"))


def _save_without_block(case: Case, folder: str) -> bool:
    engine = workloads.build(case)
    engine.train_batch(workloads.batches(engine))
    engine.save_checkpoint(folder)
    return engine.load_checkpoint(folder)[0] is not None
