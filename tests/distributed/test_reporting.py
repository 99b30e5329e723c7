"""Reports that rank 0 cannot write end no training, and leave no rank waiting for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.distributed import reporting_workloads as work
from tests.distributed.harness import run


def check_trained_on(results: list[dict[str, Any]], warning: str) -> None:
    """As a run without a report; one warning, on rank 0."""
    plain = run(2, work.train, None, {}, None)
    assert [result["losses"] for result in results] == [result["losses"] for result in plain]
    assert [result["state"] for result in results] == [result["state"] for result in plain]
    assert [result["reports"] for result in results] == [3, 3]
    (message,) = results[0]["warnings"]
    assert warning in message and results[1]["warnings"] == []


def test_a_report_that_cannot_be_begun_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    path = tmp_path / "file" / "report.jsonl"
    for message in run(2, work.refused, str(path)):
        assert message.startswith(f'dynmo.report = "{path}": cannot be written: ')


def test_one_rank_alone_may_be_given_a_report(tmp_path: Path) -> None:
    """As scripts do that configure it where the rank is 0."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    plain = run(2, work.with_a_report_on_one_rank, [None, None])
    assert run(2, work.with_a_report_on_one_rank, [str(first), None], seconds=30.0) == plain
    assert run(2, work.with_a_report_on_one_rank, [None, str(second)], seconds=30.0) == plain
    assert first.exists() and not second.exists()


def test_all_else_of_the_block_is_the_same_on_every_rank(tmp_path: Path) -> None:
    def found(*blocks: dict[str, Any]) -> list[str]:
        return run(2, work.with_a_block_of_its_own, list(blocks), seconds=30.0)

    seeds = [{"randomness": {"seed": rank}} for rank in range(2)]
    for message in found(*seeds):
        assert message.startswith("dynmo.randomness = RandomnessConfig(per_layer=True, seed=1) on a rank, on rank 0 ")
    for message in found({}, {"trace": {"path": str(tmp_path / "trace"), "steps": [1, 2]}}):
        assert message.startswith("dynmo.trace = TraceConfig(")
    traces = [{"trace": {"path": str(tmp_path / str(rank)), "steps": [1, 2]}} for rank in range(2)]
    assert found(*traces) == ["nothing was raised"] * 2
    assert found({"log": False, "monitor": False}, {}) == ["nothing was raised"] * 2


def test_a_full_disk_is_warned_of_once() -> None:
    check_trained_on(run(2, work.train, "/dev/full", {}, None), "/dev/full: was not written: [Errno 28] No space left")


def test_a_report_that_is_lost_and_found_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    check_trained_on(
        run(2, work.train, str(path), {}, str(path), True), f"{path}: was not written: [Errno 21] Is a dir"
    )
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "rebalance"] == [1, 3]


def test_a_monitor_that_fails_is_warned_of_once(tmp_path: Path) -> None:
    """DeepSpeed's own numbers are written through it too, in every batch."""
    monitors = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    results = run(2, work.train, None, monitors, str(tmp_path / "job"), True)
    check_trained_on(results, "csv_monitor: was not written: [Errno 20] Not a directory")
    rows = (tmp_path / "job" / "DynMo_layers_moved.csv").read_text().splitlines()
    assert rows == ["step,layers_moved", "6,1", "18,3"]
    losses = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in losses[1:]] == ["6", "18"]
