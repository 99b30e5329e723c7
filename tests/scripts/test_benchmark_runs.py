"""scripts/benchmark.py on emulated layers: one row per balancer, and its figures under known loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark import parse
from benchmarks.arms import engines_end_here
from benchmarks.emulated import emulated_rows
from simulation import LOAD_MODELS, Recorded
from tests.support.harness import run
from tests.support.recordings import write_recording

pytestmark = pytest.mark.ranks


def emulated(case: str, *flags: str) -> list[dict[str, Any]]:
    """Run the benchmark with small sizes."""
    sizes = ["--layers", "8", "--micro-batches", "2", "--forward-ms", "1", "--rounds", "1", "--batches", "1"]
    with engines_end_here():
        return emulated_rows(LOAD_MODELS[case], parse([*sizes, *flags]))


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
