"""Every dynamic case trains in a pipeline, and moving its layers while it is active changes no bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.models import dynamic_cases
from tests.support import case_runs
from tests.support.case_runs import CASES, SIZES, CaseRun, check_moves_change_nothing, moved, signals
from tests.support.harness import run, run_each
from tests.support.training import drop_decision, whole

pytestmark = pytest.mark.ranks

# Always tested: every kind of case, and what it has of its own. The others are in the nightly form.
FIRST = (
    "freezing and pruning",
    "egeria",
    "moe bias and freezing",
    "mod threshold",
    "pruning in CSR",
    "qk-sparse attention",
    "exits, calm tied",
)
first_of_all = pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)


@cache
def plain_run(name: str) -> list[dict[str, Any]]:
    """Run the case without moves, stops or recomputation."""
    return run(2, case_runs.train, CaseRun(CASES[name]))


@cache
def run_with_moves(name: str) -> list[dict[str, Any]]:
    """Run the case with moves."""
    return run(2, case_runs.train, moved(CaseRun(CASES[name])))


@first_of_all
@pytest.mark.every_variant
def test_moves_change_nothing(name: str) -> None:
    check_moves_change_nothing(CaseRun(CASES[name]), plain_run(name), run_with_moves(name))


@first_of_all
def test_activation_checkpointing_changes_nothing(name: str) -> None:
    """Recomputation changes nothing."""
    plain, recomputed = plain_run(name), run(2, case_runs.train, CaseRun(CASES[name], checkpoint_interval=1))
    assert plain[0]["losses"] == recomputed[0]["losses"] and plain[0]["evaluated"] == recomputed[0]["evaluated"]
    assert whole(plain) == whole(recomputed) and signals(plain) == signals(recomputed)


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


@pytest.mark.parametrize("checkpoint_interval", [0, 1])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("halves")])
def test_halves_train_as_whole_blocks(name: str, checkpoint_interval: int) -> None:
    check_halves_train_as_whole_blocks(CaseRun(CASES[name], checkpoint_interval=checkpoint_interval))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "bf16 zero1"])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("halves")])
def test_halves_train_as_whole_blocks_in_bf16(name: str, precision: str) -> None:
    halves = CaseRun(CASES[name], replicas=2, precision=precision, clip=0.0)
    check_halves_train_as_whole_blocks(halves)


@first_of_all
def test_switched_off_it_trains_the_same(name: str) -> None:
    """It equals a run with moves."""
    off = CaseRun(CASES[name], enabled=False)
    check_moves_change_nothing(off, run(2, case_runs.train, off), run_with_moves(name))


@first_of_all
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole_run, resumed = plain_run(name), run(2, case_runs.train, CaseRun(CASES[name]), str(tmp_path), 4)
    assert whole_run[0]["losses"] == resumed[0]["losses"] and whole_run[0]["evaluated"] == resumed[0]["evaluated"]
    assert whole(whole_run) == whole(resumed)


@pytest.mark.parametrize(
    "name", [name if name == "mod threshold" else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_split_backward_passes_change_nothing(name: str) -> None:
    """Layers move, too."""
    split = moved(CaseRun(CASES[name], dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}}))
    plain, ours = plain_run(name), run(2, case_runs.train, split)
    assert plain[0]["losses"] == ours[0]["losses"] and whole(plain) == whole(ours) and signals(plain) == signals(ours)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("moe bias and freezing", "v"),
        ("egeria", "loop"),
        ("mod threshold", "v"),
        ("qk-sparse attention", "loop"),
        ("exits, calm tied", "v"),
        ("pruning in CSR", "v"),
        ("freezing and pruning", "loop"),
    ],
)
def test_two_chunks_per_stage_change_nothing(name: str, kind: str) -> None:
    case_runs.check_two_chunks_change_nothing(CaseRun(CASES[name]), kind, plain_run(name))


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
    plain = CaseRun({"case": {"kind": "freezing", "automatic": {"interval": 0.1, "start": 0.0}}}, 2, 2, steps=12)
    wanted, still = (run(4, gradient_magnitudes, case) for case in (plain, replace(plain, precision=precision)))
    elsewhere = run(4, gradient_magnitudes, moved(replace(plain, precision=precision)))
    for result in (*still, *elsewhere):
        assert result["frozen"] == still[0]["frozen"] and max(result["frozen"]) > 0
        assert result["sums"][0] == pytest.approx(wanted[0]["sums"][0], rel=0.01)  # before any layer is frozen
        assert result["sums"] == [pytest.approx(sums, rel=1e-9) for sums in still[0]["sums"]]
    assert all(each["frozen"] == wanted[0]["frozen"] for each in wanted)


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
