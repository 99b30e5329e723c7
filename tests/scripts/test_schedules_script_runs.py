"""scripts/schedules.py: DeepSpeed's engines and ours train the same weights, and each has its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import schedules
from benchmarks.schedules import TRACED
from tests.support.harness import run

pytestmark = pytest.mark.ranks

SIZES = ["--layers", "4", "--micro-batches", "4", "--pass-ms", "2", "--batches", "2"]


def figures(folder: Path, *flags: str) -> Any:
    file = folder / "figures.json"
    run(2, schedules.main, [*SIZES, *flags, "--json", str(file)])
    return json.loads(file.read_text())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("split", "loads"),
    [
        ("realistic", "random"),
        ("even", "frozen"),
        ("even", "weightless"),
    ],
)
def test_every_schedule_trains_the_same_weights(split: str, loads: str, tmp_path: Path) -> None:
    found = figures(tmp_path, "--split", split, "--loads", loads)
    rows = {row["arm"]: row for row in found["arms"]}
    assert list(rows) == ["stock", "dualpipev", "1f1b", "zero_bubble", "v", "loop"]
    assert found["differing_weights"] == []
    assert found["settings"]["split"] == split
    for row in rows.values():
        low, high = row["seconds_spread"]
        assert 0 < low <= row["seconds"] <= high and len(row["batches"]) == 2
        assert 0 < row["share_of_work_bound"] < 1
        assert row["speedup_over_stock"] > 0
    for name in ("1f1b", "zero_bubble", "v", "loop"):
        row = rows[name]
        assert len(row["traced"]) == TRACED
        for batch in row["traced"]:
            assert row["simulated_seconds"] < batch["replayed_seconds"] * 1.05  # what they are told, or longer
            assert batch["replayed_seconds"] < batch["seconds"] * 1.5  # as in this batch, but for an average of passes
    assert rows["1f1b"]["splits"] == 0
    assert rows["zero_bubble"]["simulated_seconds"] <= rows["1f1b"]["simulated_seconds"]


@pytest.mark.nightly
def test_over_real_blocks_orders_come_from_a_profile(tmp_path: Path) -> None:
    sizes = ["--compute", "real", "--hidden-size", "16", "--sequence-length", "8"]
    found = figures(tmp_path, *sizes, "--arm", "auto", "--arm", "zero_bubble")
    rows = {row["arm"]: row for row in found["arms"]}
    assert list(rows) == ["stock", "zero_bubble", "auto"]
    assert found["differing_weights"] == [] and found["work_seconds"] is None
    assert rows["zero_bubble"]["is_ours"] and not rows["stock"]["is_ours"]
    for row in rows.values():
        low, high = row["speedup_over_stock_quartiles"]
        assert 0 < low <= row["speedup_over_stock"] <= high
        assert row["simulated_seconds"] is None and len(row["traced"]) == TRACED * row["is_ours"]
    assert rows["stock"]["speedup_over_stock_quartiles"] == [1.0, 1.0]


@pytest.mark.nightly
def test_batches_in_a_row(tmp_path: Path) -> None:
    flags = ["--back-to-back", "3", "--memory", "2", "--arm", "zero_bubble", "--arm", "zero_bubble_waiting"]
    found = figures(tmp_path, *flags)
    assert found["differing_weights"] == []
    stock, free, waiting = found["arms"]
    assert [row["arm"] for row in (stock, free, waiting)] == ["stock", "zero_bubble", "zero_bubble_waiting"]
    assert free["simulated_seconds"] < waiting["simulated_seconds"]
    assert all(len(row["batches"]) == 2 and row["seconds"] > 0 for row in (stock, free, waiting))
    assert all(len(row["traced"]) == TRACED for row in (free, waiting))
