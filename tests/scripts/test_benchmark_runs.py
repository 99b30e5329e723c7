"""scripts/benchmark.py on emulated layers: one row per balancer, and its figures under known loads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from benchmark import parse
from benchmarks.arms import engines_end_here
from benchmarks.emulated import emulated_rows
from simulation import LOAD_MODELS, Recorded
from simulation.runs import ARMS, DYNAMIC
from tests.support.harness import run
from tests.support.recordings import write_recording

pytestmark = pytest.mark.ranks

NUMBERS = (
    "tokens_per_second",
    "speedup_over_static",
    "speedup_over_dense",
    "share_of_ideal",
    "simulated_seconds",
    "over_simulated",
    "bubble_ratio",
    "imbalance",
    "overhead_profile",
    "overhead_decide",
    "overhead_migrate",
)


def emulated(case: str, *flags: str) -> list[dict[str, Any]]:
    """Run the benchmark with small sizes."""
    sizes = ["--layers", "8", "--micro-batches", "2", "--forward-ms", "1", "--rounds", "1", "--batches", "1"]
    with engines_end_here():
        return emulated_rows(LOAD_MODELS[case], parse([*sizes, *flags]))


@functools.cache
def table(case: str) -> dict[str, dict[str, Any]]:
    """Return the rows by balancer, with 2 stages of 4 layers."""
    rows, others = run(2, emulated, case)
    assert others == []  # rank 0 has the rows
    return {row["balancer"]: row for row in rows}


def check_rows(case: str) -> None:
    assert tuple(table(case)) == ARMS
    for arm, row in table(case).items():
        assert row["case"] == case
        assert all(isinstance(row[name], float) and row[name] >= 0 for name in NUMBERS), row
        low, high = row["tokens_per_second_spread"]
        assert low <= row["tokens_per_second"] <= high
        assert row["over_simulated"] > 1 > row["bubble_ratio"]
        overhead = row["overhead_profile"] + row["overhead_decide"] + row["overhead_migrate"]
        assert 0 < overhead < 1 if arm in DYNAMIC else overhead == 0
    assert table(case)["dense"]["speedup_over_dense"] == table(case)["oracle"]["share_of_ideal"] == 1


@pytest.mark.nightly
def test_layers_move_to_balance_loads_that_last() -> None:
    check_rows("freezing")
    frozen = {arm: row["imbalance"] for arm, row in table("freezing").items()}
    assert frozen["oracle"] < frozen["partition_time"] + 1e-9 < frozen["static_uniform"]
    # Frozen layers train no parameters. A decision may come a batch later than the oracle's.
    assert frozen["partition_parameters"] == pytest.approx(frozen["oracle"], rel=1e-3)


@pytest.mark.nightly
def test_loads_that_change_in_every_iteration() -> None:
    check_rows("moe")


@pytest.mark.nightly
def test_parameters_do_not_tell_the_loads_of_experts() -> None:
    experts = {arm: row["imbalance"] for arm, row in table("moe").items()}
    assert experts["partition_parameters"] == experts["static_uniform"]


@pytest.mark.nightly
def test_each_schedule_has_an_engine_of_its_own() -> None:
    schedules = ["1f1b", "zero_bubble", "v", "loop", "auto"]
    flags = [flag for schedule in schedules for flag in ("--schedule", schedule)]
    rows = run(2, emulated, "freezing", "--balancer", "makespan", *flags)[0]
    ran = {row["schedule"]: row for row in rows if row["balancer"] == "makespan"}
    assert list(ran) == schedules and len({row["tokens_per_second"] for row in ran.values()}) == len(ran)
    assert [len(row["start"]) for row in ran.values()] == [3, 3, 5, 5, 3]
    assert {*ran["v"]["shapes"]} == {"v"} and {*ran["loop"]["shapes"]} == {"loop"}
    best = max(ran.values(), key=lambda row: row["tokens_per_second"])
    assert [row for row in ran.values() if row["speedup_over_others"] >= 1] == [best]


def replayed(path: Path, *flags: str) -> list[dict[str, Any]]:
    """Replay a recording with small sizes."""
    arguments = parse(["--micro-batches", "2", "--forward-ms", "1", "--rounds", "1", "--balancer", "oracle", *flags])
    with engines_end_here():
        return emulated_rows(Recorded.read(path), arguments)


@pytest.mark.parametrize("interval", [25, pytest.param(1, marks=pytest.mark.nightly)])
def test_recorded_loads_are_replayed(interval: int, tmp_path: Path) -> None:
    shares = [[1, 1, 1, 1]] * 10 + [[0.1, 0.1, 2, 2]] * 10
    frozen = {10: [50, 0, 50, 50]}  # engines hear of it
    path = write_recording(tmp_path / "a.jsonl", shares, changed=[10], trainable=frozen, interval=interval)
    rows = {row["balancer"]: row for row in run(2, replayed, path, "--batches", "2")[0]}
    assert rows["oracle"]["partitions"][-1] == [0, 3, 4] and rows["static_uniform"]["partitions"] == [[0, 2, 4]]
    assert rows["oracle"]["imbalance"] < rows["static_uniform"]["imbalance"] and rows["dense"]["imbalance"] == 0
    assert {row["case"] for row in rows.values()} == {"a case"}
