"""scripts/draw.py: rows of a benchmark, and schedules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds_dynmo.errors import ConfigError
from ds_dynmo.schedules import zb_h1

pytest.importorskip("matplotlib")
import draw


@pytest.mark.filterwarnings("error")
def test_rows_of_a_benchmark_are_drawn_by_case(tmp_path: Path) -> None:
    row = {"speedup_over_static": 1.2, "tokens_per_second": 12.0, "tokens_per_second_spread": [11.0, 12.5]}
    names = ("static_uniform", "partition_time", "partition_parameters", "makespan")
    rows = [{"case": case, "balancer": name, **row} for case in ("moe", "early_exit") for name in names]
    rows += [{**one, "schedule": "zero_bubble"} for one in rows if one["balancer"] == "makespan"]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    for name in ("one.svg", "two.svg"):  # the same bytes, so that a committed picture changes only with its numbers
        draw.main(["rows", str(tmp_path / "rows.json"), str(tmp_path / name)])
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    arms = ("uniform, 1F1B", "partition, 1F1B", "makespan, 1F1B", "makespan, zero bubble")
    assert all(f">{word}<" in drawn for word in ("early exit", "moe", *arms))
    assert "throughput over the best static" in drawn and "partition under DeepSpeed's 1F1B" in drawn
    assert "parameters" not in drawn


def test_simulated_rows_have_one_baseline_for_both_schedules(tmp_path: Path) -> None:
    tokens = {"static_uniform": (4.0, 5.0), "static_profiled": (5.0, 5.5), "makespan": (6.0, 8.0)}
    keys = ("tokens_per_second_1f1b", "tokens_per_second")
    rows = [{"case": "moe", "balancer": name, **dict(zip(keys, both))} for name, both in tokens.items()]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    found = {
        (row["balancer"], row["schedule"]): row["speedup_over_static"] for row in draw.read_rows(tmp_path / "rows.json")
    }
    expected = {"static_uniform": (0.8, 1.0), "static_profiled": (1.0, 1.1), "makespan": (1.2, 1.6)}
    expected["best_static"] = expected["static_profiled"]
    assert found == {
        (name, schedule): pytest.approx(speedup)
        for name, both in expected.items()
        for schedule, speedup in zip(("1f1b", "zero_bubble"), both)
    }


def test_a_schedule_is_a_timeline_of_its_passes() -> None:
    rows = draw.scheduled(zb_h1(2, 2), "a title")
    assert rows.title == "a title" and rows.seconds == 7
    (_, first), (_, second) = rows.rows
    assert [(bar.category, bar.micro_batch, bar.begin_seconds) for bar in second] == [
        *(("forward", 0, 1.0), ("input gradient", 0, 2.0), ("forward", 1, 3.0), ("input gradient", 1, 4.0)),
        *(("weight gradient", 0, 5.0), ("weight gradient", 1, 6.0)),
    ]
    assert {bar.seconds for bar in (*first, *second)} == {1.0}


@pytest.mark.filterwarnings("error")
def test_schedules_are_drawn_beside_each_other(tmp_path: Path) -> None:
    draw.main(["schedules", "8", "12", str(tmp_path / "schedules.svg")])
    drawn = (tmp_path / "schedules.svg").read_text()
    committed = (Path(__file__).parents[2] / "docs" / "images" / "schedules.svg").read_text()
    for text in ("1F1B, 57 forward passes", "zero bubble, 43 forward passes", "weight gradient", "input gradient"):
        assert text in drawn and text in committed
    with pytest.raises(SystemExit, match="schedules 0 12: should be at least 1 each"):
        draw.main(["schedules", "0", "12", str(tmp_path / "none.svg")])


@pytest.mark.parametrize("text", ["{", "[]", "[1]", '{"rows": [{}]}'])
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/rows.json: has no rows of a benchmark")):
        draw.read_rows(tmp_path / "rows.json")
