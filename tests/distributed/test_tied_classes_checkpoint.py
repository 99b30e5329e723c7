"""Checkpoints of layers of different classes tied by one key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.errors import CheckpointError
from tests.distributed.harness import run
from tests.distributed.support.checkpoints import (
    load_and_continue,
    load_as,
    load_stock_weights,
    save_and_continue,
    save_as,
)
from tests.distributed.support.configs import Case
from tests.distributed.support.tied_layers import ENDS, FIRST, WAYS
from tests.distributed.support.training import batches, build, state, whole


def save_and_continue_tied(case: Case, way: str, folder: str) -> dict[str, Any]:
    return save_and_continue(case, folder, None, WAYS[way])


def load_and_continue_tied(case: Case, way: str, folder: str, trained: int) -> dict[str, Any]:
    return load_and_continue(case, folder, trained, WAYS[way])


@pytest.mark.parametrize(
    ("way", "precision", "stages"),
    [
        *((way, "fp32", 3) for way in ENDS),
        *(pytest.param(way, "bf16 zero1", 3, marks=() if way in FIRST else pytest.mark.nightly) for way in ENDS),
        *(pytest.param(way, "bf16", 4, marks=pytest.mark.nightly) for way in ENDS),
    ],
)
def test_a_run_resumes_at_another_number_of_stages(tmp_path: Path, way: str, precision: str, stages: int) -> None:
    case = Case(stages=2, clip=0.5, precision=precision, groups="two")
    saved = run(2, save_and_continue_tied, case, way, str(tmp_path))
    loaded = run(stages, load_and_continue_tied, replace(case, stages=stages), way, str(tmp_path), 1)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


@pytest.mark.nightly
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(3, 2), (2, 3), (3, 4)])
def test_uses_on_one_stage_after_loading_stay_equal(tmp_path: Path, saved_on: int, loaded_on: int) -> None:
    case = Case(stages=saved_on, groups="two", start=(0, 1, 6, 8) if saved_on == 3 else None)
    saved = run(saved_on, save_and_continue_tied, case, "in the middle", str(tmp_path))
    start = {2: (0, 2, 8), 3: (0, 1, 7, 8), 4: (0, 1, 5, 7, 8)}[loaded_on]
    case = replace(case, stages=loaded_on, start=start)
    loaded = run(loaded_on, load_and_continue_tied, case, "in the middle", str(tmp_path), 1)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


def save_as_tied(which: str, case: Case, way: str, folder: str) -> Any:
    return save_as(which, case, folder, WAYS[way])


def load_as_tied(which: str, case: Case, way: str, folder: str) -> Any:
    return load_as(which, case, folder, WAYS[way])


@pytest.mark.parametrize(
    ("way", "writer", "reader"),
    [
        pytest.param(way, *pair, marks=() if way == "gdgpt" or turn == number else pytest.mark.nightly)
        for turn, way in enumerate(["sparkjiao", "gdgpt", "gdgpt, one class"])
        for number, pair in enumerate([("stock", "ours"), ("ours", "stock"), ("moved and back", "stock")])
    ],
)
def test_checkpoints_load_in_stock_and_back(tmp_path: Path, writer: str, reader: str, way: str) -> None:
    case = Case(stages=2, clip=0.0, groups="two", scheduler=True)
    saved = run(2, save_as_tied, writer, case, way, str(tmp_path))
    loaded = run(2, load_as_tied, reader, case, way, str(tmp_path))
    assert [found[:2] for found in loaded] == saved


def load_stock_weights_tied(case: Case, way: str, folder: str) -> Any:
    return load_stock_weights(case, folder, WAYS[way])


@pytest.mark.nightly
@pytest.mark.parametrize("way", ENDS)
def test_stock_weights_load(tmp_path: Path, way: str) -> None:
    case = Case(stages=2, clip=0.0)
    run(2, save_as_tied, "stock", case, way, str(tmp_path))
    found = [run(n, load_stock_weights_tied, replace(case, stages=n), way, str(tmp_path))[0] for n in (2, 3)]
    assert found[0] == found[1]


def refuse(case: Case, way: str, folders: Sequence[str], steps: int) -> dict[str, Any]:
    """Load from each of ``folders``, which are all of another model, and train on."""
    engine = build(case, WAYS[way])
    data = batches(engine)
    losses = [engine.train_batch(data).item()]
    before, messages = state(engine), []
    for folder in folders:
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            messages.append(str(error))
    unchanged = state(engine) == before
    losses += [engine.train_batch(data).item() for _ in range(steps - 1)]
    return {"messages": messages, "unchanged": unchanged, "losses": losses}


@pytest.mark.nightly
def test_a_checkpoint_of_other_tied_classes_is_refused(tmp_path: Path) -> None:
    """It is found before anything changes."""
    case = Case(stages=2)
    for way in ("sparkjiao", "gdgpt", "gdgpt, other name"):
        run(2, save_as_tied, "ours", case, way, str(tmp_path / way))
        run(2, save_as_tied, "stock", case, way, str(tmp_path / f"stock {way}"))
    for way in ("sparkjiao", "gdgpt", "gdgpt, other name"):
        others = [str(path) for path in sorted(tmp_path.iterdir()) if path.name not in (way, f"stock {way}")]
        refused, still = (run(2, refuse, case, way, folders, 3) for folders in (others, []))
        for found, expected in zip(refused, still, strict=True):
            assert len(found["messages"]) == len(others) and found["unchanged"]
            assert found["losses"] == expected["losses"]


@pytest.mark.parametrize("way", ["sparkjiao", "gdgpt"])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (2, 1)])
def test_a_run_resumes_to_and_from_one_stage(tmp_path: Path, way: str, saved_on: int, loaded_on: int) -> None:
    case = Case(stages=saved_on, precision="bf16")
    saved = run(saved_on, save_and_continue_tied, case, way, str(tmp_path))
    loaded = run(loaded_on, load_and_continue_tied, replace(case, stages=loaded_on), way, str(tmp_path), 1)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (2, 1)])
def test_uses_of_one_class_resume_to_and_from_one_stage(
    tmp_path: Path, precision: str, saved_on: int, loaded_on: int
) -> None:
    """On one stage DeepSpeed makes one module of uses of one class; its files serve for both."""
    case = Case(stages=saved_on, precision=precision, groups="two", clip=0.0)
    saved = run(saved_on, save_and_continue_tied, case, "megatron", str(tmp_path))
    loaded = run(loaded_on, load_and_continue_tied, replace(case, stages=loaded_on), "megatron", str(tmp_path), 1)
    assert loaded[0]["losses"] == saved[0]["losses"]
