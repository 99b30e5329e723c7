"""Experts that the data-parallel replicas of a stage share: the same model, and its layers move with their shares."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import case_workloads, moe_workloads
from tests.distributed import expert_parallel_workloads as work
from tests.distributed.case_workloads import SIZES, CaseRun
from tests.distributed.harness import run, run_each
from tests.distributed.test_bitwise import whole
from tests.distributed.test_cases import check_moves_change_nothing, moved

MODELS: dict[str, dict[str, Any]] = {
    "auxiliary loss": {"moe": {"experts": 4, "expert_parallel": True}},
    "sbase with capacity": {
        "moe": {"experts": 4, "expert_parallel": True, "routing": "sbase", "capacity_factor": 0.8, "every": 2}
    },
    "bias and freezing": {
        "freezing": {"schedule": [[0.3, 1], [0.6, 3]]},
        "moe": {"experts": 6, "expert_parallel": True, "routing": "bias", "bias_rate": 0.02, "dense_blocks": 1},
    },
    "mod": {"mod": {"capacity": 0.4, "sampling": "topk"}, "moe": {"experts": 2, "expert_parallel": True, "top_k": 1}},
}
TABLES = [
    [[2, 1, 3, 0, 1, 4], [1, 1, 1, 1, 1, 1], [0, 5, 0, 2, 0, 0]],
    [[3, 2, 0, 0, 1, 0], [1, 4, 0, 0, 0, 0], [2, 2, 0, 0, 3, 5]],  # nothing for the second replica's experts
    [[0, 0, 0, 0, 0, 0], [1, 0, 2, 0, 3, 0], [0, 0, 0, 0, 0, 2]],  # nothing of the first one's
]


# Models that are tried each time; the others in the fuzz form.
FIRST = ("sbase with capacity", "bias and freezing")
first = pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.fuzz) for name in MODELS]
)


@pytest.mark.parametrize("table", TABLES)
def test_rows_go_to_their_experts_and_back(table: list[list[int]]) -> None:
    assert all(run(3, work.through, table))


@cache
def undisturbed(name: str) -> list[dict[str, Any]]:
    """What a model comes to if nothing moves, stops or is recomputed."""
    return run(4, case_workloads.train, CaseRun(MODELS[name], replicas=2))


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("auxiliary loss", 0.0),
        *(pytest.param(name, 0.05, marks=() if name in FIRST else pytest.mark.fuzz) for name in MODELS),
    ],
)
def test_it_is_the_model_with_all_experts_on_every_replica(name: str, clip: float) -> None:
    shared = CaseRun(MODELS[name], replicas=2, optimizer="SGD", clip=clip)
    ours, theirs = run(4, work.train, shared), run(4, work.train, work.unsharded(shared))
    np.testing.assert_allclose(ours[0]["losses"], theirs[0]["losses"], rtol=1e-6)
    if clip:
        np.testing.assert_allclose(ours[0]["norms"], theirs[0]["norms"], rtol=1e-5)
        assert min(theirs[0]["norms"]) > clip
    assert all(rank["losses"] == ours[0]["losses"] and rank["norms"] == ours[0]["norms"] for rank in ours)
    expected = {key: weight for rank in theirs for key, (_, weight) in rank["weights"].items()}
    shares = 0
    for rank in ours:
        for key, (first, weight) in rank["weights"].items():
            whole_weight = expected[key]
            np.testing.assert_allclose(weight, whole_weight[first : first + len(weight)], rtol=1e-5, atol=1e-6)
            shares += 2 * len(weight) == len(whole_weight)
    blocks = {"auxiliary loss": 4, "sbase with capacity": 2, "bias and freezing": 3, "mod": 4}[name]
    assert shares == blocks * 2 * 2  # replicas, weights of each


@first
def test_moves_change_nothing(name: str) -> None:
    check_moves_change_nothing(CaseRun(MODELS[name], replicas=2), undisturbed(name))


def test_moves_over_three_stages_change_nothing() -> None:
    check_moves_change_nothing(CaseRun(MODELS["bias and freezing"], stages=3, replicas=2, clip=0.05))


@first
def test_recomputing_changes_nothing(name: str) -> None:
    """With layers on the move, too."""
    again, expected = CaseRun(MODELS[name], replicas=2, checkpoint_interval=1), undisturbed(name)
    for found in run_each(4, case_workloads.train, (again,), (moved(again),)):
        assert expected[0]["losses"] == found[0]["losses"] and whole(expected) == whole(found)


def test_switched_off_it_learns_the_same() -> None:
    """As a run whose layers are on the move."""
    case = CaseRun(MODELS["auxiliary loss"], replicas=2)
    check_moves_change_nothing(case, run(4, case_workloads.train, replace(case, enabled=False)))


def test_a_decision_after_every_batch_changes_nothing() -> None:
    often, never = (
        run(4, moe_workloads.train, CaseRun(MODELS["auxiliary loss"], replicas=2, dynmo=dynmo))
        for dynmo in (moe_workloads.EVERY, {"interval": 0})
    )
    assert often[0]["moved"] > 0 == never[0]["moved"]
    assert often[0]["losses"] == never[0]["losses"]
    assert all(rank["signals"] == often[0]["signals"] for rank in often)


@pytest.mark.parametrize("favourites", [False, True])
def test_the_load_signal_is_the_busiest_replicas_share(favourites: bool) -> None:
    """Of the work if every token went to every expert; it is the same on all replicas, for every micro-batch counts."""
    model = {"moe": {"experts": 4, "expert_parallel": True, "routing": "bias"}}
    case = CaseRun(model, replicas=2)
    layers: dict[int, list[dict[str, Any]]] = {}
    for found in run(4, work.watch, case, favourites):
        for layer in found:
            layers.setdefault(layer["layer"], []).append(layer)
    assert len(layers) == 4
    tokens = 2 * SIZES["sequence_length"]  # of a micro-batch
    for one, other in layers.values():
        counts = [np.diff(np.array(replica["sums"]), axis=0, prepend=0) for replica in (one, other)]
        table = counts[0] + counts[1]  # [micro-batches, experts]
        busiest = np.maximum(table[:, :2].sum(axis=1), table[:, 2:].sum(axis=1)).sum()
        assert one["signal"] == other["signal"] == pytest.approx(busiest / (4 * 3 * tokens))
        assert one["signal"] == 1.0 if favourites else 0.5 <= one["signal"] < 1.0  # 2 of 4 experts, if shared evenly
        assert one["finite"] and other["finite"]
        assert one["shapes"] == other["shapes"] == [[2, 32, 16], [2, 16, 32]]
    if favourites:
        everywhere = run(4, work.watch, work.unsharded(case), True)
        assert layers[1][0]["loss"] == pytest.approx(everywhere[0][0]["loss"], rel=1e-6)


@first
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(name: str, tmp_path: Path) -> None:
    resumed = run(4, case_workloads.train, CaseRun(MODELS[name], replicas=2), str(tmp_path), 3)
    through = undisturbed(name)
    assert through[0]["losses"] == resumed[0]["losses"] and through[0]["evaluated"] == resumed[0]["evaluated"]
    assert whole(through) == whole(resumed)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_another_number_of_replicas_is_refused(saved: int, loaded: int, tmp_path: Path) -> None:
    case = CaseRun(MODELS["auxiliary loss"])
    run(2 * saved, work.save, replace(case, replicas=saved), str(tmp_path))
    for said, same in run(2 * loaded, work.load, replace(case, replicas=loaded), str(tmp_path)):
        assert f"written with {saved} data-parallel replicas, expected {loaded}" in said and same


def test_what_is_refused_is_refused_on_every_rank() -> None:
    """Though the first of three stages has no such layer."""
    odd = {"moe": {"experts": 3, "expert_parallel": True, "dense_blocks": 2}}
    good = {"moe": {"experts": 4, "expert_parallel": True, "dense_blocks": 2}}
    runs = [CaseRun(odd, stages=3, replicas=2)]
    runs += [CaseRun(good, stages=3, replicas=2, precision=precision) for precision in ("bf16", "fp32 zero1")]
    ranks = run(6, work.refused, runs)
    assert all(said == ranks[0] for said in ranks)
    uneven, bf16, zero1 = ranks[0]
    assert "3 experts (model.moe.experts) cannot be shared out evenly over 2 data-parallel replicas" in uneven
    assert "moe.expert_parallel) with bf16 or ZeRO" in bf16 and bf16 == zero1
