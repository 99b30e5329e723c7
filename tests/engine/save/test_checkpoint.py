"""A run that resumes from a checkpoint, at any partition, equals an uninterrupted one, to the bit."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from tests.support.checkpoints import STEPS, check_same, load_and_continue, save_and_continue, skewed, train_on
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.models import Block, Embedding, layers_tied_in_the_middle, module_of, project
from tests.support.pages import code_blocks
from tests.support.training import build, micro_batch, state, whole

pytestmark = pytest.mark.ranks


def _uniform(stages: int) -> list[int]:
    from ds_dynmo import partitioners

    return list(partitioners.uniform(8, stages))[1:]


@pytest.mark.parametrize(
    ("precision", "tied", "stages"),
    [
        *(("fp32", True, 1), ("fp32", True, 3), ("bf16 zero1", True, 2)),
        *(pytest.param("fp32", True, stages, marks=pytest.mark.nightly) for stages in (2, 4)),
        *(pytest.param("bf16 zero1", True, stages, marks=pytest.mark.nightly) for stages in (1, 3, 4)),
        *(pytest.param("fp32", False, stages, marks=pytest.mark.nightly) for stages in (1, 2, 3, 4)),
    ],
)
def test_a_run_resumes_at_every_number_of_stages(tmp_path: Path, stages: int, precision: str, tied: bool) -> None:
    case = Case(stages=stages, tied=tied, clip=0.05, precision=precision)
    move = skewed(stages) if stages > 1 else None
    saved = run(case.ranks, save_and_continue, case, str(tmp_path), move)
    for other in (1, 2, 3, 4):
        loaded = run(other, load_and_continue, replace(case, stages=other), str(tmp_path))
        check_same(saved, loaded)
        assert loaded[0]["partition"] == (saved[0]["partition"] if other == stages else [0, *_uniform(other)])
        assert loaded[0]["client"] == {"epoch": 4, "best": [1.5]}
        if other == stages:
            assert [r["random"] for r in loaded] == [r["random"] for r in saved]


RECIPE = code_blocks("checkpoints.md", "Resume a run", "python")[0]


def follow_the_recipe(case: Case, folder: str, steps: int) -> dict[str, Any]:
    """Run the code that is printed."""
    os.chdir(folder)
    names: dict[str, Any] = {
        **{"module": module_of(case), "config": config(case), "steps": steps},
        "micro_batches": lambda first: (micro_batch(number, 0) for number in itertools.count(first)),
    }
    exec(RECIPE, names)
    return {"loss": names["loss"].item(), "state": state(names["engine"]), "replica": 0}


def test_the_printed_recipe_resumes_a_run_on_another_number_of_stages(tmp_path: Path) -> None:
    in_one_go = run(2, follow_the_recipe, Case(), str(tmp_path), 12)
    (tmp_path / "run" / "latest").unlink()
    run(2, follow_the_recipe, Case(), str(tmp_path), 10)
    resumed = run(3, follow_the_recipe, Case(stages=3), str(tmp_path), 12)
    assert resumed[0]["loss"] == in_one_go[0]["loss"] and whole(resumed) == whole(in_one_go)


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
def test_a_run_resumes_in_an_engine_that_trained_at_another_partition(tmp_path: Path, case: Case) -> None:
    saved = run(case.ranks, save_and_continue, case, str(tmp_path), skewed(case.stages))
    loaded = run(case.ranks, load_and_continue, case, str(tmp_path), 2)
    check_same(saved, loaded)
    assert [r["random"] for r in loaded] == [r["random"] for r in saved]
    assert loaded[0]["partition"] == skewed(case.stages)
    assert loaded[0]["settled"] == saved[0]["settled"]


def test_a_resumed_run_keeps_the_times_of_profiles_and_decisions(tmp_path: Path) -> None:
    case = Case(stages=2)
    saved = run(2, save_and_continue, case, str(tmp_path))
    loaded = run(2, load_and_continue, case, str(tmp_path), 1)
    assert loaded[0]["settled"] == saved[0]["settled"] == 2 * STEPS


def test_switched_off_it_stays_at_its_partition(tmp_path: Path) -> None:
    case = Case(stages=2)
    saved = run(2, save_and_continue, case, str(tmp_path), skewed(2))
    loaded = run(2, load_and_continue, replace(case, dynmo={"enabled": False}), str(tmp_path))
    check_same(saved, loaded)
    assert loaded[0]["partition"] == [0, 4, 8] and saved[0]["partition"] == [0, 1, 8]


@pytest.mark.parametrize(("before", "after"), [pytest.param(1, 2, marks=pytest.mark.nightly), (2, 1)])
def test_a_run_resumes_with_another_number_of_replicas(tmp_path: Path, before: int, after: int) -> None:
    case = Case(stages=2, replicas=before, tied=True)
    run(case.ranks, save_and_continue, case, str(tmp_path), skewed(2))
    case = replace(case, replicas=after)
    ways = [
        run(case.ranks, load_and_continue, replace(case, start=start), str(tmp_path)) for start in (None, (0, 6, 8))
    ]
    check_same(*ways)


def all_wrapped_ties(case: Case) -> list[Any]:
    """Return layers whose tied uses all have a function around them, so that DeepSpeed writes no file for them."""

    def look_up(layer: Embedding, tokens: torch.Tensor) -> torch.Tensor:
        return layer(tokens)

    tied = [TiedLayerSpec("e", Embedding, 1, forward_fn=how, tied_weight_attr="weight") for how in (look_up, project)]
    return [tied[0], *[LayerSpec(Block, index) for index in range(3)], tied[1]]


def tie_without_functions(case: Case) -> list[Any]:
    return layers_tied_in_the_middle(case)


@pytest.mark.parametrize("make_layers", [all_wrapped_ties, tie_without_functions])
@pytest.mark.parametrize("stages", [1, 3])
def test_ties_of_every_kind_are_saved_and_loaded(tmp_path: Path, make_layers: Any, stages: int) -> None:
    case = Case(stages=2, clip=0.05)
    saved = run(2, save_and_continue, case, str(tmp_path), None, make_layers)
    loaded = run(stages, load_and_continue, replace(case, stages=stages), str(tmp_path), 0, make_layers)
    check_same(saved, loaded)


def state_after_loading(case: Case, folder: str, save: bool) -> dict[str, Any]:
    engine = build(case)
    if save:
        train_on(engine, 0)
        engine.rebalance([0, 1, 8])
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return {"state": state(engine), "replica": engine.grid.get_data_parallel_id()}


# -- wrapped optimizers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "before", "after"),
    [
        pytest.param(precision, *sizes, marks=() if number == turn or turn == 1 else pytest.mark.nightly)
        for turn, precision in enumerate(("bf16", "bf16 zero1", "fp32 zero1"))
        for number, sizes in enumerate(((1, 2), (2, 1), (2, 3)))
    ],
)
def test_shards_load_with_another_number_of_replicas(tmp_path: Path, precision: str, before: int, after: int) -> None:
    case = Case(stages=2, replicas=before, precision=precision, groups="two", tied=True)
    saved = run(case.ranks, state_after_loading, case, str(tmp_path), True)
    case = replace(case, replicas=after, stages=1 if after == 3 else 2)
    assert whole(run(case.ranks, state_after_loading, case, str(tmp_path), False)) == whole(saved)


SHAPES = {"chain": [0, 3, 8], "v": [0, 1, 3, 7, 8], "loop": [0, 2, 3, 5, 8]}  # of two stages


def of_shape(shape: str, case: Case) -> Case:
    return replace(case, dynmo={"interval": 0, "schedule": "1f1b" if shape == "chain" else shape})


def save_and_load_everywhere(case: Case, folder: str) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Save in every shape, and load in the others, a V in a V, and a loop in a run that may go to any."""
    found = []
    for first, partition in SHAPES.items():
        saved = save_and_continue(of_shape(first, case), f"{folder}/{first}", partition)
        others = [
            *(shape for shape in SHAPES if shape != first or shape == "v"),
            *(["auto"] if first == "loop" else []),
        ]
        loaded = {shape: load_and_continue(of_shape(shape, case), f"{folder}/{first}") for shape in others}
        found += [(first, shape, saved, outcome) for shape, outcome in loaded.items()]
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_a_run_resumes_in_any_shape(tmp_path: Path, precision: str) -> None:
    case = Case(precision=precision, tied=precision != "fp32", groups="two", clip=0.0, micro_batches=4)
    ranks = run(2, save_and_load_everywhere, case, str(tmp_path))
    for number, (first, shape, *_) in enumerate(ranks[0]):
        saved, loaded = ([rank[number][which] for rank in ranks] for which in (2, 3))
        check_same(saved, loaded)
        built = [0, 4, 8] if shape == "chain" else [0, 2, 4, 6, 8]
        assert loaded[0]["partition"] == (SHAPES[first] if shape in (first, "auto") else built)
    calls = [
        (of_shape(shape, replace(case, stages=3)), f"{tmp_path}/{first}")
        for first, shape in zip(SHAPES, ("v", "loop", "chain"))
    ]
    for loaded in run_each(3, load_and_continue, *calls):
        check_same(saved, loaded)
    check_same(saved, run(1, load_and_continue, of_shape("v", replace(case, stages=1)), f"{tmp_path}/v"))
