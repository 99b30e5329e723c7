"""A run that resumes from a checkpoint, at any partition, equals an uninterrupted one, to the bit."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from ds_dynmo import partitioners
from tests.support.checkpoints import (
    check_comes_back,
    check_same,
    load_and_continue,
    outcome,
    save_and_come_back,
    save_and_continue,
    skewed,
    train_on,
)
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.models import Block, Embedding, layers, layers_tied_in_the_middle, module_of, project
from tests.support.pages import code_blocks
from tests.support.training import build, micro_batch, state, whole

pytestmark = pytest.mark.ranks

SAVED = Case(stages=2, tied=True, clip=0.05, precision="bf16 zero1", micro_batches=2)
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Results]:
    """The folder in which a run saved, and what the run had later."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run(2, save_and_continue, SAVED, folder, skewed(2), layers, 2)


def check_resumes(case: Case, folder: str, saved: Results, numbers: Sequence[int]) -> None:
    for stages in numbers:
        loaded = run(stages, load_and_continue, replace(case, stages=stages), folder, 0, layers, 2)
        check_same(saved, loaded)
        assert loaded[0]["client"] == {"epoch": 4, "best": [1.5]}
        if stages == case.stages:
            assert loaded[0]["partition"] == saved[0]["partition"]
            assert [found["random"] for found in loaded] == [found["random"] for found in saved]
        else:
            assert loaded[0]["partition"] == list(partitioners.uniform(8, stages))


def test_a_run_resumes_at_every_number_of_stages(saved: tuple[str, Results]) -> None:
    check_resumes(SAVED, *saved, (1, 2, 3))


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_a_run_on_any_number_of_stages_resumes_on_any(tmp_path: Path, precision: str, stages: int) -> None:
    case = replace(SAVED, stages=stages, precision=precision)
    move = skewed(stages) if stages > 1 else None
    found = run(stages, save_and_continue, case, str(tmp_path), move, layers, 2)
    check_resumes(case, str(tmp_path), found, (1, 2, 3, 4))


def test_it_stays_at_its_partition_if_switched_off_and_a_copy_loads_too(
    saved: tuple[str, Results], tmp_path: Path
) -> None:
    folder, found = saved
    shutil.copytree(next(Path(folder).glob("global_step*")), tmp_path / "renamed")
    (tmp_path / "latest").write_text("renamed")
    off = replace(SAVED, dynmo={"enabled": False})
    stays, copied = run_each(2, load_and_continue, (off, folder, 0, layers, 2), (SAVED, str(tmp_path), 1, layers, 2))
    check_same(found, stays)
    check_same(found, copied)
    assert [loaded[0]["partition"] for loaded in (stays, copied)] == [[0, 4, 8], [0, 1, 8]]


RECIPE = code_blocks("checkpoints.md", "Resume a run", "python")[0]


def follow_the_recipe(case: Case, folder: str, steps: int) -> dict[str, Any]:
    """Run the code that is printed. Return the loss and the state at its end, and the first micro-batch."""
    os.chdir(folder)
    firsts = []

    def micro_batches(first: int) -> Iterator[Any]:
        firsts.append(first)
        return (micro_batch(number, 0) for number in itertools.count(first))

    names: dict[str, Any] = {"module": module_of(case), "config": config(case), "steps": steps}
    names["micro_batches"] = micro_batches
    exec(RECIPE, names)
    return {"loss": names["loss"].item(), "state": state(names["engine"]), "replica": 0, "firsts": firsts}


def test_the_printed_recipe_resumes_a_run_on_another_number_of_stages(tmp_path: Path) -> None:
    in_one_go = run(2, follow_the_recipe, Case(), str(tmp_path), 12)
    resumed = run(3, follow_the_recipe, Case(stages=3), str(tmp_path), 12)
    assert resumed[0]["loss"] == in_one_go[0]["loss"] and whole(resumed) == whole(in_one_go)
    assert [found[0]["firsts"] for found in (in_one_go, resumed)] == [[0], [10 * Case().micro_batches]]
    assert sorted(os.listdir(tmp_path / "run")) == ["global_step10", "latest"]


def test_a_run_comes_back_with_every_kind_of_optimizer_and_of_groups(tmp_path: Path) -> None:
    cases = [
        Case(groups="sparse", scheduler=True, micro_batches=2),
        *(Case(optimizer=optimizer, micro_batches=2) for optimizer in ("SGD", "Adafactor")),
        Case(groups="two", precision="bf16", scheduler=True, micro_batches=2),
    ]
    calls = [(case, str(tmp_path / str(number))) for number, case in enumerate(cases)]
    for case, ranks in zip(cases, run_each(2, save_and_come_back, *calls), strict=True):
        check_comes_back(case, ranks)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(replicas=2, groups="two", precision="bf16 zero1 fp32sums", micro_batches=2), id="fp32 sums"),
        pytest.param(Case(replicas=2, clip=0.05), id="fp32", marks=pytest.mark.nightly),
        pytest.param(
            Case(replicas=2, groups="two", precision="fp32 zero1", tied=True),
            id="fp32 zero1",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_run_of_replicas_comes_back(tmp_path: Path, case: Case) -> None:
    check_comes_back(case, run(4, save_and_come_back, case, str(tmp_path)))


def save_state(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case)
    train_on(engine, 0, 2)
    engine.rebalance([0, 1, 8])
    engine.save_checkpoint(folder)
    return {"state": state(engine), "replica": engine.grid.get_data_parallel_id()}


def load_state(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case)
    engine.load_checkpoint(folder)
    found = {"state": state(engine), "replica": engine.grid.get_data_parallel_id()}
    return {**found, "losses": train_on(engine, 2, 1)}


@pytest.mark.parametrize(
    ("precision", "before"),
    [
        ("bf16 zero1", 2),
        *(pytest.param(precision, 2, marks=pytest.mark.nightly) for precision in ("fp32", "bf16", "fp32 zero1")),
        *(pytest.param(precision, 1, marks=pytest.mark.nightly) for precision in ("fp32", "bf16", "bf16 zero1")),
    ],
)
def test_state_loads_with_another_number_of_replicas(tmp_path: Path, precision: str, before: int) -> None:
    case = Case(replicas=before, precision=precision, groups="two", tied=True, micro_batches=2)
    saved = run(case.ranks, save_state, case, str(tmp_path))
    for stages, replicas in ((2, 3 - before), (1, 3)):
        other = replace(case, stages=stages, replicas=replicas)
        loaded = run(other.ranks, load_state, other, str(tmp_path))
        assert whole(loaded) == whole(saved), replicas
        assert all(0 < loss < 5 for found in loaded for loss in found["losses"]), replicas


def all_wrapped_ties(case: Case) -> list[Any]:
    """Return layers whose tied uses all have a function around them, so that DeepSpeed writes no file for them."""

    def look_up(layer: Embedding, tokens: torch.Tensor) -> torch.Tensor:
        return layer(tokens)

    tied = [TiedLayerSpec("e", Embedding, 1, forward_fn=how, tied_weight_attr="weight") for how in (look_up, project)]
    return [tied[0], *[LayerSpec(Block, index) for index in range(3)], tied[1]]


def test_ties_of_every_kind_are_saved_and_loaded(tmp_path: Path) -> None:
    case, ties = Case(clip=0.05, micro_batches=2), (all_wrapped_ties, layers_tied_in_the_middle)
    calls = [(case, f"{tmp_path}/{make_layers.__name__}", None, make_layers, 2) for make_layers in ties]
    runs = run_each(2, save_and_continue, *calls)
    for saved, (_, folder, _, make_layers, _), stages in zip(runs, calls, (1, 3), strict=True):
        check_same(saved, run(stages, load_and_continue, replace(case, stages=stages), folder, 0, make_layers, 2))


# -- shapes -------------------------------------------------------------------------------------------

SHAPES = {"chain": [0, 3, 8], "v": [0, 1, 3, 7, 8], "loop": [0, 2, 3, 5, 8]}  # of two stages
BUILT = {"chain": [0, 4, 8], "v": [0, 2, 4, 6, 8], "loop": [0, 2, 4, 6, 8]}
# What was saved, and the run that loads it; "auto" may go to any shape.
LOADS = [("chain", "v"), ("v", "loop"), ("v", "v"), ("loop", "chain"), ("loop", "auto")]


def of_shape(shape: str, case: Case) -> Case:
    return replace(case, dynmo={"interval": 0, "schedule": "1f1b" if shape == "chain" else shape})


def save_and_load_everywhere(case: Case, folder: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Save in every shape, and load as ``LOADS`` says; return what a run has after a save, and after each load."""
    engines = {kind: build(of_shape(kind, case)) for kind in ("v", "loop")}
    for kind, engine in engines.items():
        train_on(engine, 0, 1)
        for shape in [kind] if kind == "v" else [kind, "chain"]:
            engine.rebalance(SHAPES[shape])
            engine.save_checkpoint(f"{folder}/{shape}")
    saved = outcome(engines["loop"], train_on(engines["loop"], 1, 1))
    engines |= {kind: build(of_shape(kind, case)) for kind in ("chain", "auto")}
    loaded = []
    for shape, kind in LOADS:
        if kind != "auto":
            engines[kind].rebalance(BUILT[kind])
        engines[kind].load_checkpoint(f"{folder}/{shape}")
        loaded.append(outcome(engines[kind], train_on(engines[kind], 1, 1)))
    return saved, loaded


def load_shapes(case: Case, folder: str, shapes: Sequence[str]) -> list[dict[str, Any]]:
    engine, found = build(case), []
    for shape in shapes:
        engine.load_checkpoint(f"{folder}/{shape}")
        found.append(outcome(engine, train_on(engine, 1, 1)))
    return found


@pytest.mark.parametrize("precision", ["bf16 zero1", pytest.param("fp32", marks=pytest.mark.nightly)])
def test_a_run_resumes_in_any_shape(tmp_path: Path, precision: str) -> None:
    case = Case(precision=precision, tied=precision != "fp32", groups="two", clip=0.0, micro_batches=4)
    saved, loads = zip(*run(2, save_and_load_everywhere, case, str(tmp_path)))
    for (shape, kind), *loaded in zip(LOADS, *loads, strict=True):
        check_same(list(saved), loaded)
        assert loaded[0]["partition"] == (SHAPES[shape] if kind in (shape, "auto") else BUILT[kind]), (shape, kind)
    for stages, kind, shapes in ((3, "loop", ("chain", "v")), (1, "v", ("loop",))):
        other = of_shape(kind, replace(case, stages=stages))
        for loaded in zip(*run(stages, load_shapes, other, str(tmp_path), shapes), strict=True):
            check_same(list(saved), list(loaded))
