"""Layers of different classes tied by one key: each use keeps parameters of its own, the tied ones stay equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import tied_workloads as work
from tests.distributed.harness import RankError, run, run_each
from tests.distributed.test_bitwise import whole
from tests.distributed.workloads import Case


def check_same(still: list[dict[str, Any]], moved: list[dict[str, Any]]) -> dict[str, Any]:
    assert moved[0]["moved"] > 0 and still[0]["moved"] == 0
    for what in ("losses", "norms", "evaluations"):
        assert [r[what] for r in moved] == [r[what] for r in still]
    assert whole(moved) == whole(still)
    return whole(moved)


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16 zero1", 1), ("fp32 zero1", 2), ("bf16 zero1 fp32sums", 2)],
)
def test_uses_that_move_meet_and_part(precision: str, replicas: int) -> None:
    case = Case(stages=3, clip=0.5, groups="two", precision=precision, replicas=replicas)
    moves = [[0, 2, 3, 8], [0, 5, 7, 8], [0, 1, 2, 8], [0, 6, 7, 8], [0, 1, 7, 8], [0, 4, 5, 8]]
    calls = [(case, "in the middle", way, 7) for way in ([], moves)]
    found = check_same(*run_each(case.ranks, work.train, *calls))
    assert found["1.weight"] == found["4.inner.weight"]
    assert found["3.inner.weight"] == found["6.weight"] and found["3.inner.bias"] == found["6.bias"]


ENDS = ["sparkjiao", "other attribute", "gdgpt", "gdgpt, other name", "gdgpt, one class", "function around", "megatron"]


@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize(("precision", "replicas"), [("fp32", 1), ("bf16 zero1", 2)])
def test_ends_of_a_model(way: str, precision: str, replicas: int) -> None:
    """A model with its embedding and its head, a move at every step."""
    case = Case(stages=2, clip=0.5, precision=precision, replicas=replicas)
    moves = [[0, 1, 8], [0, 6, 8], [0, 7, 8], [0, 4, 8]]
    check_same(*run_each(case.ranks, work.train, *((case, way, moved, 5) for moved in ([], moves))))


@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize(
    ("precision", "stages"), [("fp32", 3), pytest.param("bf16", 4, marks=pytest.mark.fuzz), ("bf16 zero1", 3)]
)
def test_at_another_number_of_stages(tmp_path: Path, way: str, precision: str, stages: int) -> None:
    case = Case(stages=2, clip=0.5, precision=precision, groups="two")
    saved = run(2, work.save_and_go_on, case, way, str(tmp_path))
    loaded = run(stages, work.load_and_go_on, replace(case, stages=stages), way, str(tmp_path), 1)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(3, 2), (2, 3), (3, 4)])
def test_uses_that_meet_after_loading(tmp_path: Path, saved_on: int, loaded_on: int) -> None:
    case = Case(stages=saved_on, groups="two", start=(0, 1, 6, 8) if saved_on == 3 else None)
    saved = run(saved_on, work.save_and_go_on, case, "in the middle", str(tmp_path))
    start = {2: (0, 2, 8), 3: (0, 1, 7, 8), 4: (0, 1, 5, 7, 8)}[loaded_on]
    case = replace(case, stages=loaded_on, start=start)
    loaded = run(loaded_on, work.load_and_go_on, case, "in the middle", str(tmp_path), 1)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


@pytest.mark.parametrize("way", ["sparkjiao", "gdgpt", "gdgpt, one class"])
@pytest.mark.parametrize(("writer", "reader"), [("stock", "ours"), ("ours", "stock"), ("moved and back", "stock")])
def test_stock_both_ways(tmp_path: Path, writer: str, reader: str, way: str) -> None:
    case = Case(stages=2, clip=0.0, groups="two", scheduler=True)
    saved = run(2, work.save_as, writer, case, way, str(tmp_path))
    loaded = run(2, work.load_as, reader, case, way, str(tmp_path))
    assert [found[:2] for found in loaded] == saved


@pytest.mark.parametrize("way", ENDS)
def test_weights_of_stock(tmp_path: Path, way: str) -> None:
    case = Case(stages=2, clip=0.0)
    run(2, work.save_as, "stock", case, way, str(tmp_path))
    found = [run(n, work.load_stock_weights, replace(case, stages=n), way, str(tmp_path))[0] for n in (2, 3)]
    assert found[0] == found[1]


def test_a_checkpoint_of_another_way_is_refused(tmp_path: Path) -> None:
    """Whatever does not fit is found before anything changes."""
    case = Case(stages=2)
    for way in ("sparkjiao", "gdgpt", "gdgpt, other name"):
        run(2, work.save_as, "ours", case, way, str(tmp_path / way))
        run(2, work.save_as, "stock", case, way, str(tmp_path / f"stock {way}"))
    for way in ("sparkjiao", "gdgpt", "gdgpt, other name"):
        others = [str(path) for path in sorted(tmp_path.iterdir()) if path.name not in (way, f"stock {way}")]
        refused, still = (run(2, work.refuse, case, way, folders, 3) for folders in (others, []))
        for found, expected in zip(refused, still, strict=True):
            assert len(found["messages"]) == len(others) and found["unchanged"]
            assert found["losses"] == expected["losses"]


def test_stock_trains_the_same() -> None:
    """As long as nothing is clipped: DeepSpeed's norm is the first stage's."""
    for way in ("sparkjiao", "gdgpt"):
        case = Case(stages=2, clip=0.0)
        stock, ours = (run(2, work.losses_of, which, case, way) for which in ("stock", "ours"))
        assert stock == ours


@pytest.mark.parametrize("precision", ["fp32", "fp32 zero1"])
def test_every_weight_is_clipped_by_once(precision: str) -> None:
    for engine, whole_model in run(2, work.norms, Case(stages=2, clip=0.01, precision=precision), "gdgpt, other name"):
        assert engine == pytest.approx(whole_model, rel=1e-5)


@pytest.mark.parametrize(
    ("way", "copy", "converted_once"),
    [("gdgpt", "embed_tokens.weight", True), ("gdgpt, other name", "lm_head.weight", False)],
)
def test_only_copies_are_marked(way: str, copy: str, converted_once: bool) -> None:
    """For DeepSpeed's norm, and for its universal conversion, which leaves them out on all stages but the first."""
    case = Case(stages=2, precision="bf16 zero1")
    for first, last in run_each(2, work.marks, (case, way), (case, way, [0, 6, 8])):
        assert not any(replicated for _, replicated, _ in first)
        assert [name for name, replicated, _ in last if replicated] == [f"tied_modules.embed.{copy}"]
        assert [name for name, _, left_out in last if left_out] == [f"tied_modules.embed.{copy}"] * converted_once


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tied_weight_frozen_in_one_use(precision: str) -> None:
    for message, stays in run(2, work.freeze_one_use, Case(stages=2, precision=precision), "gdgpt, other name"):
        assert "trains as embed_tokens.weight of layer 0 and is frozen as lm_head.weight of layer 7" in message
        assert stays


def test_the_engine_has_to_be_told_of_a_tied_weight_that_was_frozen() -> None:
    for message, layer in zip(run(2, work.freeze_untold, Case(stages=2), "gdgpt"), (0, 7), strict=True):
        assert f"a tied weight of layer {layer} was frozen" in message


@pytest.mark.parametrize(("way", "precision"), [("sparkjiao", "fp32"), ("gdgpt", "bf16 zero1")])
def test_all_on_one_stage_and_back(way: str, precision: str) -> None:
    case = Case(stages=2, precision=precision, dynmo={"interval": 0, "repack": {"release": "park"}})
    still, packed = run_each(2, work.repack, (case, way, {}, 6), (case, way, {2: 1, 4: 2}, 6))
    assert still[0]["losses"] == packed[0]["losses"]
    assert whole(packed) == whole(still)


@pytest.mark.parametrize(("precision", "clip"), [("fp32", 0.5), ("bf16", 0.5), ("bf16 zero1", 0.0)])
@pytest.mark.parametrize("way", ["sparkjiao", "gdgpt, other name"])
def test_uses_that_deepspeed_did_not_build(way: str, precision: str, clip: float) -> None:
    """It builds the first on a stage alone; a model of one stage trains as that of two does."""
    case = Case(stages=1, precision=precision, clip=clip)
    one = run(1, work.train, case, way, [], 4)
    two = run(2, work.train, replace(case, stages=2), way, [], 4)
    for what in ("losses", "norms", "evaluations"):
        assert one[0][what] == two[0][what]
    assert whole(one) == whole(two)


def test_uses_that_deepspeed_did_not_build_among_others() -> None:
    case = Case(stages=2, groups="one", replicas=2, precision="bf16 zero1")
    moves = [[0, 4, 8], [0, 2, 8], [0, 7, 8]]
    check_same(*run_each(case.ranks, work.train, *((case, "in the middle", moved, 5) for moved in ([], moves))))


def test_a_parameter_of_no_group_is_refused() -> None:
    run(1, work.train, Case(stages=1, groups="two"), "sparkjiao", [], 1)
    with pytest.raises(RankError, match=r"ConfigError: layer 7: norm.weight is in none of the 2 parameter groups"):
        run(1, work.train, Case(stages=1, groups="two"), "gdgpt", [], 1)


@pytest.mark.parametrize("way", ["sparkjiao", "gdgpt"])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (2, 1)])
def test_to_and_from_one_stage(tmp_path: Path, way: str, saved_on: int, loaded_on: int) -> None:
    case = Case(stages=saved_on, precision="bf16")
    saved = run(saved_on, work.save_and_go_on, case, way, str(tmp_path))
    loaded = run(loaded_on, work.load_and_go_on, replace(case, stages=loaded_on), way, str(tmp_path), 1)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (2, 1)])
def test_one_class_to_and_from_one_stage(tmp_path: Path, precision: str, saved_on: int, loaded_on: int) -> None:
    """On one stage DeepSpeed makes uses of one class one module, whose files will do for both."""
    case = Case(stages=saved_on, precision=precision, groups="two", clip=0.0)
    saved = run(saved_on, work.save_and_go_on, case, "megatron", str(tmp_path))
    loaded = run(loaded_on, work.load_and_go_on, replace(case, stages=loaded_on), "megatron", str(tmp_path), 1)
    assert loaded[0]["losses"] == saved[0]["losses"]


@pytest.mark.parametrize("way", ["sparkjiao", "function around"])
def test_a_tied_weight_in_two_parameter_groups_is_refused(way: str) -> None:
    for message in run(2, work.groups_apart, Case(stages=2), way):
        assert "is in different parameter groups where they are: ['0', '1']" in message
