"""scripts/benchmark.py on emulated layers: one row per balancer, and what the rows say of loads that are known."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.simulation import ARMS, DYNAMIC
from tests.distributed.benchmark_workloads import emulated
from tests.distributed.harness import run_each

NUMBERS = (
    "tokens_per_second",
    "speedup_over_static",
    "speedup_over_dense",
    "share_of_ideal",
    "share_of_bound",
    "bubble_ratio",
    "imbalance",
    "overhead_profile",
    "overhead_decide",
    "overhead_migrate",
)


@pytest.fixture(scope="module")
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """By case and balancer: loads that last, and loads that change in every iteration; 2 stages of 4 layers."""
    lasting, changing = run_each(2, emulated, ("freezing",), ("moe",))
    assert lasting[1] == changing[1] == []  # rank 0 has the rows
    return {
        case: {row["balancer"]: row for row in rows[0]} for case, rows in (("freezing", lasting), ("moe", changing))
    }


@pytest.mark.parametrize("case", ["freezing", "moe"])
def test_there_is_a_row_for_every_balancer(case: str, tables: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert tuple(tables[case]) == ARMS
    for arm, row in tables[case].items():
        assert row["case"] == case
        assert all(isinstance(row[name], float) and row[name] >= 0 for name in NUMBERS), row
        low, high = row["tokens_per_second_spread"]
        assert low <= row["tokens_per_second"] <= high
        assert row["share_of_bound"] < 1 and row["bubble_ratio"] < 1
        overhead = row["overhead_profile"] + row["overhead_decide"] + row["overhead_migrate"]
        assert 0 < overhead < 1 if arm in DYNAMIC else overhead == 0
    assert tables[case]["dense"]["speedup_over_dense"] == tables[case]["oracle"]["share_of_ideal"] == 1


def test_layers_moved_where_the_loads_say(tables: dict[str, dict[str, dict[str, Any]]]) -> None:
    frozen = {arm: row["imbalance"] for arm, row in tables["freezing"].items()}
    assert frozen["oracle"] < frozen["partition_time"] + 1e-9 < frozen["static_uniform"]
    assert frozen["partition_parameters"] == pytest.approx(frozen["oracle"])  # frozen layers train no parameters
    experts = {arm: row["imbalance"] for arm, row in tables["moe"].items()}
    assert experts["partition_parameters"] == experts["static_uniform"]  # parameters do not tell experts' loads
    assert (
        tables["moe"]["partition_time"]["overhead_profile"] > tables["freezing"]["partition_time"]["overhead_profile"]
    )
