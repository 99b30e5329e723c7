"""The benchmark's arithmetic on made-up figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.emulation import told_passes
from benchmarks.rows import Measured, Slice, print_rows, print_schedules, rows, rows_by_schedule
from ds_dynmo.partitioners import LayerPasses
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import one_f_one_b, schedule_for_equal_costs
from simulation import Phase
from simulation.statics import STATICS, Statics

DENSE = told_passes(Phase.of([1] * 4), 1.0)
HALF = told_passes(Phase.of([0, 0, 1, 1]), 1.0)
IN_A_ROW = one_f_one_b(2, 8)


def run(
    seconds: list[float], partition: tuple[int, ...] = (0, 2, 4), passes: LayerPasses = HALF, **cost: float
) -> Measured:
    costs, placement = (
        (cost.get("profile", 0.0), cost.get("decide", 0.0), cost.get("migrate", 0.0)),
        Placement.chain(partition),
    )
    return Measured([[Slice(10, 10 * one, passes, placement, IN_A_ROW, costs)] for one in seconds])


MEASURED = {
    "static_uniform": run([60.0, 50.0, 100.0]),
    "static_parameters": run([70.0, 60.0, 110.0]),
    "partition_time": run([30.0, 50.0, 40.0], (0, 3, 4), profile=6.0, decide=2.0, migrate=4.0),
    "oracle": run([25.0, 25.0, 40.0], (0, 3, 4)),
    "dense": run([120.0, 100.0, 200.0], passes=DENSE),
}


def test_ratios_are_medians_of_the_rounds() -> None:
    table = {row["balancer"]: row for row in rows("freezing", MEASURED, tokens=120)}
    own = table["partition_time"]
    assert own["tokens_per_second"] == 3 and own["tokens_per_second_spread"] == [2.4, 4]
    assert own["speedup_over_static"] == 2  # of 2, 1 and 2.5: the better static is the uniform one
    assert table["static_parameters"]["speedup_over_static"] == pytest.approx(60 / 70)
    assert own["speedup_over_dense"] == 4 and table["static_uniform"]["speedup_over_dense"] == 2
    assert own["share_of_ideal"] == pytest.approx(25 / 30) and table["oracle"]["share_of_ideal"] == 1


def test_shares_come_from_the_layers_own_seconds() -> None:
    table = {row["balancer"]: row for row in rows("freezing", MEASURED, tokens=120)}
    own, dense = table["partition_time"], table["dense"]
    # 8 micro-batches of 3 s per stage, and the first and last pass of the other stage
    assert own["simulated_seconds"] == 27 and dense["simulated_seconds"] == 9 * 6
    assert own["over_simulated"] == pytest.approx((40 - 1.2) / 27)  # rebalances are not simulated
    assert own["simulated_speedup_over_static"] == pytest.approx(48 / 27)
    assert own["bubble_ratio"] == pytest.approx(1 - 24 / 40) and own["imbalance"] == 0
    assert table["static_uniform"]["imbalance"] == 2


def test_overheads_are_shares_of_an_iteration() -> None:
    own = next(row for row in rows("freezing", MEASURED, tokens=120) if row["balancer"] == "partition_time")
    assert own["overhead_profile"] == pytest.approx(0.6 / 40)
    assert own["overhead_decide"] == pytest.approx(0.2 / 40)
    assert own["overhead_migrate"] == pytest.approx(0.4 / 40)


def test_a_run_of_phases_counts_each_by_its_iterations() -> None:
    even = Placement.chain([0, 2, 4])
    phases = [Slice(30, 30 * 2.0, DENSE, even, IN_A_ROW), Slice(10, 10 * 6.0, HALF, even, IN_A_ROW)]
    measured = Measured([phases])
    assert measured.seconds() == [3]
    assert measured.mean(lambda one: one.busy_seconds) == pytest.approx((30 * 48 + 10 * 24) / 40)
    assert measured.row()["imbalance"] == pytest.approx(0.5)


def test_loads_are_those_of_both_chunks_of_a_stage() -> None:
    v = Slice(1, 30.0, HALF, Placement.v([0, 1, 2, 3, 4]), schedule_for_equal_costs(2, 8, shape="v"))
    assert v.stage_loads == [3, 3] and v.imbalance == 0 and v.busy_seconds == 24
    assert 48 < replace(v, passes=DENSE).simulated_seconds < 54  # 1F1B needs 54
    row = Measured([[v]]).row()
    assert (row["partitions"], row["shapes"]) == ([[0, 1, 2, 3, 4]], ["v"])
    assert row["over_simulated"] == 30 / v.simulated_seconds and row["bubble_ratio"] == pytest.approx(0.2)


def test_equal_partitions_are_run_once() -> None:
    known = Statics(
        {"static_uniform": (0, 2, 4), "static_parameters": (0, 2, 4), "static_profiled": (0, 3, 4)},
        {"static_uniform": 4.0, "static_parameters": 4.0, "static_profiled": 3.0},
        dict.fromkeys(STATICS, 0.5),
        (1.0, 1.0, 1.0, 1.0),
        (0, 1, 2, 3, 4),
    )
    own = {arm: one for arm, one in MEASURED.items() if arm != "static_parameters"}
    profiled = run([40.0, 40.0, 50.0], (0, 3, 4))
    table = {one["balancer"]: one for one in rows("freezing", {**own, "static_profiled": profiled}, 120, known)}
    same, uniform = table["static_parameters"], table["static_uniform"]
    assert same == {**uniform, "balancer": "static_parameters"} and same["measured_as"] == "static_uniform"
    assert table["partition_time"]["speedup_over_static"] == 1.25  # of 1.33, 0.8 and 1.25: over the profiled one
    assert table["partition_time"]["start"] == [0, 3, 4] and table["dense"]["start"] == [0, 2, 4]
    assert known.lines()[2].startswith("static profiled [0, 3, 4]: predicted iteration 3.000 s, imbalance 0.50, best")


def test_without_an_oracle_there_is_no_share_of_it() -> None:
    real = {arm: one for arm, one in MEASURED.items() if arm != "oracle"}
    assert {row["share_of_ideal"] for row in rows("freezing", real, tokens=120)} == {None}


def test_the_table_has_a_dash_for_missing_values(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(rows("freezing", {name: one for name, one in MEASURED.items() if name != "oracle"}, tokens=120))
    head, *lines = capsys.readouterr().out.strip().splitlines()
    assert head.split()[:2] == ["case", "balancer"] and head.split()[-3:] == ["profile", "decide", "migrate"]
    cells = {line.split("  ")[1]: line.split()[-11:] for line in lines}
    assert cells["partition_time"][:5] == ["3", "2.00", "2.33", "4.00", "-"]  # no share of an ideal that was not run
    assert cells["partition_time"][-3:] == ["1.50%", "0.50%", "1.00%"]
    assert cells["dense"][-3:] == cells["static uniform"][-3:] == ["-", "-", "-"]


def of_schedules() -> list[dict[str, object]]:
    """The same run under a second schedule, under which the balancer's engine is faster."""
    faster = {**MEASURED, "partition_time": run([24.0, 25.0, 40.0], (0, 3, 4)), "oracle": run([20.0, 20.0, 40.0])}
    return rows_by_schedule("freezing", {"1f1b": MEASURED, "zero_bubble": faster}, tokens=120)


def test_each_schedule_is_over_the_same_static_partition() -> None:
    table = of_schedules()
    named = [(row["balancer"], row["schedule"]) for row in table]
    assert len(set(named)) == len(named) == len(MEASURED) + 2
    assert [schedule for balancer, schedule in named if balancer in (*STATICS, "dense")] == ["1f1b"] * 3
    first, second = (row for row in table if row["balancer"] == "partition_time")
    assert (first["speedup_over_static"], second["speedup_over_static"]) == (2, 2.5)  # of 2.5, 2 and 2.5
    assert second["speedup_over_parameters"] == 2.75  # of 2.92, 2.4 and 2.75
    assert (first["speedup_over_others"], second["speedup_over_others"]) == (0.8, 1.25)
    assert second["share_of_ideal"] == pytest.approx(20 / 24)  # of the oracle under the same schedule


def test_schedules_are_shown_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    print_schedules(of_schedules())
    _, head, first, second, *others = capsys.readouterr().out.strip().splitlines()
    assert head.split("  ")[-1].strip() == "over the best other"
    assert first.split()[:4] == ["freezing", "partition_time", "1f1b", "2.00"] and first.split()[-1] == "0.80"
    assert second.split()[:4] == ["freezing", "partition_time", "zero_bubble", "2.50"] and second.split()[-1] == "1.25"
    assert [line.split()[1] for line in others] == ["oracle", "oracle"]
    print_rows(of_schedules())
    assert "partition_time, zero_bubble" in capsys.readouterr().out
    print_schedules(rows_by_schedule("freezing", {"1f1b": MEASURED}, tokens=120))
    assert not capsys.readouterr().out
