"""ds-dynmo-simulate: what it makes of a report or of costs, against every partition, and what it refuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.cli import simulate
from ds_dynmo.engine.decide.decision_input import DecisionInput
from ds_dynmo.partitioners import MemoryModel, PipelineModel
from ds_dynmo.placement import Placement
from ds_dynmo.plan import LayerCost, Profile

MIB = 2**20
SECONDS = (0.001, 0.003, 0.003, 0.003, 0.003, 0.004)  # forward; a backward pass takes twice as long


def profile(step: int = 7, slower: float = 1.0, **layer: Any) -> Profile:
    sizes = {"parameters": 1, "trainable_parameters": 1, "static_bytes": 40 * MIB}
    sizes |= {"activation_bytes": 4 * MIB, "input_bytes": MIB}
    layers = tuple(LayerCost(slower * one, slower * 2 * one, **{**sizes, **layer}) for one in SECONDS)
    return Profile(step, Placement.chain([0, 3, 6]), layers, micro_batches=8, batch_seconds=0.4)


def report_of(folder: Path, *profiles: Profile) -> str:
    path = folder / "report.jsonl"
    path.write_text("".join(json.dumps(one.as_record()) + "\n" for one in profiles))
    return str(path)


def rows_of(tmp_path: Path, *given: str) -> list[dict[str, Any]]:
    assert simulate.main([*given, "--json", str(tmp_path / "rows.json")]) == 0
    rows: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())
    return rows


def partitions(stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, 6) for inner in itertools.combinations(range(1, 6), stages - 1)]


@pytest.mark.parametrize("stages", [2, 3])
def test_the_partition_is_the_shortest_of_all(stages: int, tmp_path: Path) -> None:
    shape = ["--stages", str(stages), "--micro-batches", "4", "16", "--schedule", "1f1b"]
    rows = rows_of(tmp_path, report_of(tmp_path, profile()), *shape)
    backward = tuple(2 * one for one in SECONDS)
    for row, micro_batches in zip(rows, (4, 16), strict=True):
        model = PipelineModel(SECONDS, backward, micro_batches, (1.0,) * stages)
        seconds = {partition: model.seconds_under_1f1b(partition) for partition in partitions(stages)}
        shortest, default = min(seconds.values()), seconds[{2: (0, 3, 6), 3: (0, 2, 4, 6)}[stages]]
        assert seconds[tuple(row["partition"])] == row["iteration_seconds"] == pytest.approx(shortest)
        assert row["over_default"] == pytest.approx(default / shortest) and row["over_static"] == pytest.approx(1)
        work = micro_batches * 3 * sum(SECONDS)
        assert row["bubble_ratio"] == pytest.approx(1 - work / (stages * shortest))
        assert (row["stages"], row["micro_batches"], row["schedule"]) == (stages, micro_batches, "1f1b")


def test_costs_are_those_of_a_run_without_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = [str(3e3 * one) for one in SECONDS]
    (row,) = rows_of(tmp_path, "--costs", *costs, "--stages", "2", "--schedule", "1f1b")
    shown = capsys.readouterr().out.splitlines()
    (measured,) = rows_of(tmp_path, report_of(tmp_path, profile()), "--schedule", "1f1b")
    assert row["stage_bytes"] == [] and row["micro_batches"] == measured["micro_batches"] == 8
    for name in ("iteration_seconds", "bubble_ratio", "over_default", "over_static"):
        assert row[name] == pytest.approx(measured[name])
    assert row["partition"] == measured["partition"]
    assert len(shown) == 2 and shown[0].split("  ")[0] == "stages" and shown[1].endswith(str(row["partition"]))


def test_zero_bubble_is_shorter_and_as_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a measurement, 40% of a backward pass are for weights; with one, what was measured."""
    path = report_of(tmp_path, profile())
    both = ("--stages", "3", "--schedule", "1f1b", "zero_bubble")
    plain, split = rows_of(tmp_path, path, *both)
    assert "step 7: 6 layers in 2 stages, [0, 3, 6], 8 micro-batches, a batch took 400.0 ms" in capsys.readouterr().out
    assert [row["schedule"] for row in (plain, split)] == ["1f1b", "zero_bubble"]
    assert split["iteration_seconds"] < plain["iteration_seconds"] and split["bubble_ratio"] < plain["bubble_ratio"]
    shares = [{"input_gradient_seconds": first, "weight_gradient_seconds": 0.008 - first} for first in (0.002, 0.006)]
    measured = [rows_of(tmp_path, report_of(tmp_path, profile(**share)), *both)[1] for share in shares]
    assert measured[0]["iteration_seconds"] < measured[1]["iteration_seconds"]


def test_two_chunks_per_stage_are_the_shortest_of_all_and_auto_takes_the_best(tmp_path: Path) -> None:
    path = report_of(tmp_path, profile())
    rows = rows_of(tmp_path, path, "--schedule", "1f1b", "zero_bubble", "v", "loop", "auto")
    one_f_one_b, zero_bubble, v, loop, auto = (row["iteration_seconds"] for row in rows)
    given = DecisionInput.of(simulate.with_assumed_splits(profile()), searches=True)
    for shape, row in (("v", rows[2]), ("loop", rows[3])):
        every = [Placement.of_shape(shape, partition) for partition in partitions(4)]  # type: ignore[arg-type]
        seconds = {placement.boundaries: given.pipeline.iteration_seconds(placement) for placement in every}
        assert row["iteration_seconds"] == pytest.approx(seconds[tuple(row["partition"])], rel=0.01)
        assert row["iteration_seconds"] == pytest.approx(min(seconds.values()), rel=0.01)
        assert row["over_static"] == pytest.approx(one_f_one_b / row["iteration_seconds"])
    assert v < zero_bubble < one_f_one_b and auto == min(v, loop, zero_bubble)
    assert [row["schedule"] for row in rows] == ["1f1b", "zero_bubble", "v", "loop", "auto: v"]
    assert rows[4]["partition"] == rows[2]["partition"] and rows[4]["stage_bytes"] == rows[2]["stage_bytes"]


def test_two_chunks_per_stage_need_layers_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(tmp_path, "--costs", *"12345", "--stages", "1", "3", "--schedule", "v", "auto", "loop")
    assert [(row["stages"], row["schedule"]) for row in rows] == [
        (1, "v"),
        (1, "auto"),
        (1, "loop"),
        (3, "auto: zero_bubble"),
    ]
    shown = capsys.readouterr().out
    for what in ("v: a V", "loop: a loop"):
        assert f"3 stages, 12 micro-batches, {what} of 3 stages needs at least 6 layers, the model has 5\n" in shown


def test_bytes_are_of_layers_and_of_passes_in_flight(tmp_path: Path) -> None:
    path = report_of(tmp_path, profile(workspace_bytes=MIB))
    for flags, interval in (([], 0), (["--checkpoint-interval", "2"], 2)):
        plain, split = rows_of(tmp_path, path, *flags, "--schedule", "1f1b", "zero_bubble")
        sizes = [tuple(size * MIB for _ in SECONDS) for size in (40, 4, 1)]
        memory = MemoryModel(*sizes, (10**12,) * 2, 8, interval)
        assert plain["stage_bytes"] == [
            MIB + held for held in memory.bytes_per_stage(Placement.chain(plain["partition"]))
        ]
        assert (
            max(split["stage_bytes"]) <= max(memory.bytes_per_stage(Placement.chain(split["partition"]))) + MIB
        )  # that of 1F1B


def test_a_memory_limit_is_met_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = report_of(tmp_path, profile())
    (free,) = rows_of(tmp_path, path, "--schedule", "1f1b")
    limit = max(free["stage_bytes"]) - MIB
    (limited,) = rows_of(tmp_path, path, "--schedule", "1f1b", "--memory-limit", f"{limit}B")
    assert max(limited["stage_bytes"]) <= limit and limited["iteration_seconds"] > free["iteration_seconds"]
    capsys.readouterr()
    rows = rows_of(tmp_path, path, "--stages", "1", "3", "--memory-limit", "150MiB")
    assert {(row["stages"], row["schedule"]) for row in rows} == {(3, kind) for kind in simulate.BY_DEFAULT}
    assert all(max(row["stage_bytes"]) <= 150 * MIB for row in rows)
    assert "1 stage, 8 micro-batches, 1f1b: " in capsys.readouterr().out
    assert rows_of(tmp_path, path, "--memory-limit", "100MiB") == []
    for line in capsys.readouterr().out.splitlines()[2:]:
        assert "2 stages, 8 micro-batches, " in line and " bytes, its limit is 104857600" in line


def test_the_latest_profile_counts_or_that_of_a_step(tmp_path: Path) -> None:
    path = report_of(tmp_path, profile(3), profile(9, slower=2.0))
    flags = ("--schedule", "1f1b")
    (late,), (early,) = rows_of(tmp_path, path, *flags), rows_of(tmp_path, path, "--step", "8", *flags)
    assert late["iteration_seconds"] == pytest.approx(2 * early["iteration_seconds"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give the report of a run, or --costs"),
        (["REPORT", "--costs", "1"], "give the report of a run, or --costs"),
        (["--costs", "1", "2"], "--costs: needs --stages"),
        (["--costs", "1", "2", "--stages", "3"], "--stages 3: the model has 2 layers"),
        (["--costs", "1", "-2", "--stages", "1"], "--costs -2: should be milliseconds, at least 0"),
        (["--costs", "1", "--stages", "1", "--step", "3"], "--step: is that of a report"),
        (["REPORT", "--stages", "2", "0"], "--stages 0: should be at least 1"),
        (["REPORT", "--micro-batches", "0"], "--micro-batches 0: should be at least 1"),
        (["REPORT", "--step", "2"], "--step 2: the first profile is of step 7"),
        (["REPORT", "--memory-limit", "80%"], "--memory-limit 80%: of which device?"),
        (["REPORT", "--memory-limit", "much"], "--memory-limit much: should be null, an int of bytes"),
        (["REPORT", "--checkpoint-interval", "-1"], "--checkpoint-interval -1: should be at least 0"),
        (["none.jsonl"], "none.jsonl: cannot be read"),
        (["--case", "moe"], "--case: withdrawn; python scripts/simulate_runs.py has it"),
        (["--recorded=runs"], "--recorded: withdrawn; python scripts/simulate_runs.py has it"),
    ],
)
def test_what_cannot_be_simulated_is_named(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = report_of(tmp_path, profile())
    assert simulate.main([path if word == "REPORT" else word for word in given]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"ds-dynmo-simulate: error: {message}") and line.count("\n") == 1


def test_a_report_without_a_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.jsonl").write_text('{"kind": "step", "step": 1}\n')
    assert simulate.main([str(tmp_path / "report.jsonl")]) == 2
    assert "has no profile: nothing was measured before the run ended" in capsys.readouterr().err
