"""Every dynamic case trains in a pipeline, and moving its layers while it is active changes no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.models import dynamic_cases
from tests.support import case_runs
from tests.support.case_runs import (
    CASES,
    SIZES,
    CaseRun,
    check_all_ways,
    check_moves_change_nothing,
    moved,
    ways,
)
from tests.support.harness import run, run_each
from tests.support.training import drop_decision, whole

pytestmark = pytest.mark.ranks

HALVES = [name for name in CASES if name.startswith("halves")]
# Every kind of case, and what it has of its own, in one way each; the nightly form has all cases in all ways.
FIRST = {
    "pruning in CSR": ("moved, recomputed, resumed", "fp32"),  # there is no CSR in bf16
    "freezing and pruning": ("moved in a loop", "bf16 zero1"),
    "moe bias and freezing": ("moved in a V", "bf16 zero1"),
    "qk-sparse attention": ("moved, recomputed", "bf16 zero1"),
    "egeria": ("moved, recomputed", "bf16 zero1"),
    "mod threshold": ("moved with split backward passes", "bf16 zero1"),
    "exits, calm tied": ("moved, recomputed, resumed", "bf16 zero1"),
}


@pytest.mark.parametrize("name", FIRST)
def test_moves_change_nothing(name: str, tmp_path: Path) -> None:
    """Of a run that is switched off: not with restarts, recomputation, two chunks or split passes either."""
    way, precision = FIRST[name]
    case = CaseRun(CASES[name], precision=precision, steps=5)
    off = replace(case, enabled=False)
    still, found = run_each(2, case_runs.train, (off,), ways(case, str(tmp_path))[way])
    check_moves_change_nothing(case, still, found)
    for event in ("moved", "saved") if "resumed" in way else ("moved",):  # the case had done something by then
        assert min(rank["least"][event] for rank in found) < 1.0, event


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_no_way_to_run_a_case_changes_anything(name: str, tmp_path: Path) -> None:
    check_all_ways(CaseRun(CASES[name]), str(tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("checkpoint_interval", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_moves_change_nothing_under_any_setting(
    name: str, precision: str, stages: int, replicas: int, checkpoint_interval: int
) -> None:
    check_moves_change_nothing(CaseRun(CASES[name], stages, replicas, precision, checkpoint_interval))


def as_whole_blocks(state: dict[str, Any]) -> dict[str, Any]:
    """Rename the state of a split model to the names of whole blocks."""
    blocks = SIZES["layers"]
    renamed = {}
    for key, value in state.items():
        layer, name = key.split(".", 1)
        number = (int(layer) + 1) // 2 if int(layer) <= 2 * blocks else int(layer) - blocks
        renamed[f"{number}.{name}"] = value
    return renamed


def check_halves_train_as_whole_blocks(halves: CaseRun) -> None:
    """Compare a split model whose layers move with whole blocks that do not."""
    plain = replace(halves, model={**halves.model, "split_blocks": False}, checkpoint_interval=0)
    blocks, split = run_each(halves.ranks, case_runs.train, (plain,), (moved(halves),))
    assert blocks[0]["losses"] == split[0]["losses"] and blocks[0]["evaluated"] == split[0]["evaluated"]
    assert whole(blocks) == as_whole_blocks(whole(split))
    assert min(rank["least"]["moved"] for rank in split) < 0.5  # frozen, or pruned
    assert split[0]["partition"][1] in (2, case_runs.num_layers(halves) - 2)


@pytest.mark.parametrize("checkpoint_interval", [pytest.param(0, marks=pytest.mark.nightly), 1])
@pytest.mark.parametrize("name", HALVES)
def test_halves_train_as_whole_blocks(name: str, checkpoint_interval: int) -> None:
    check_halves_train_as_whole_blocks(CaseRun(CASES[name], checkpoint_interval=checkpoint_interval, steps=5))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "bf16 zero1"])
@pytest.mark.parametrize("name", HALVES)
def test_halves_train_as_whole_blocks_in_bf16(name: str, precision: str) -> None:
    check_halves_train_as_whole_blocks(CaseRun(CASES[name], replicas=2, precision=precision, clip=0.0))


def gradient_magnitudes(run: CaseRun) -> dict[str, Any]:
    """Return, per step, the model's gradient magnitudes by layer, and how many layers are frozen afterwards."""
    engine, model = case_runs.build(run)
    data, found = case_runs.batches(engine, model), []
    engine.before_step(lambda: found.append(engine.gradient_magnitudes()))
    (case,) = dynamic_cases(model, engine, total_steps=run.steps)
    sums, frozen = [], []
    for step in range(run.steps):
        case.before_batch(step)
        if step in run.moves:
            engine.rebalance(run.moves[step])
        drop_decision(engine)
        engine.train_batch(data)
        sums.append(engine.sum_over_world(found[step]).tolist())
        case.after_batch(step + 1)
        frozen.append(case._controller.frozen_prefix(step + 1))
    return {"sums": sums, "frozen": frozen}


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.nightly), "bf16 zero1"])
def test_automatic_freezing_sees_the_gradients_of_the_whole_batch(precision: str) -> None:
    """They are averaged over micro-batches and replicas, wherever layers and gradients are."""
    model = {"seed": 2, "case": {"kind": "freezing", "automatic": {"interval": 0.25, "start": 0.0}}}  # soon freezes
    case = CaseRun(model, stages=1, replicas=2, precision=precision, clip=0.0, steps=4)
    ((wanted, _), still) = run_each(2, gradient_magnitudes, (replace(case, precision="fp32", steps=1),), (case,))
    elsewhere = run(4, gradient_magnitudes, moved(replace(case, stages=2)))
    for result in (*still, *elsewhere):
        assert result["frozen"] == still[0]["frozen"] and max(result["frozen"]) > 0
        assert result["sums"][0] == pytest.approx(wanted["sums"][0], rel=0.01)  # before any layer is frozen
        assert result["sums"] == [pytest.approx(sums, rel=1e-9) for sums in still[0]["sums"]]
