"""A report that rank 0 cannot write neither ends training nor blocks other ranks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.errors import ConfigError
from tests.support.configs import Case
from tests.support.harness import run
from tests.support.training import Warnings, batches, build, reports_of, state

pytestmark = pytest.mark.ranks

MOVES = ([0, 3, 8], [0, 5, 8], [0, 2, 8])


def _kept(path: Path) -> Path:
    return path.with_name("kept")


def _replace(path: Path) -> None:
    """Replace a file by a folder, or a folder by a file."""
    was_file = path.is_file()
    path.rename(_kept(path))
    path.mkdir() if was_file else path.write_text("no folder")


def _restore(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    _kept(path).rename(path)


def train(
    report: str | None, monitors: dict[str, Any], lost: str | None, back: bool = False, trace: Any = None
) -> dict[str, Any]:
    """Train three batches, with a rebalance after each.

    Args:
        lost: a path that is replaced before the second batch.
        back: whether it is restored before the third.
    """
    warnings = Warnings()
    engine = build(Case(dynmo={"interval": 0, "report": report, "trace": trace}), more=monitors)
    data, losses = batches(engine), []
    for step, move in enumerate(MOVES):
        if lost is not None and engine.global_rank == 0:
            if step == 1:
                _replace(Path(lost))
            elif step == 2 and back:
                _restore(Path(lost))
        losses.append(engine.train_batch(data).item())
        engine.rebalance(move)
    return {"losses": losses, "state": state(engine), "warnings": warnings.messages, "reports": len(reports_of(engine))}


def check_trained_on(results: list[dict[str, Any]], warning: str) -> None:
    """Check that training equals a run without a report, and that only rank 0 warned, once."""
    plain = run(2, train, None, {}, None)
    assert [result["losses"] for result in results] == [result["losses"] for result in plain]
    assert [result["state"] for result in results] == [result["state"] for result in plain]
    assert [result["reports"] for result in results] == [3, 3]
    (message,) = results[0]["warnings"]
    assert warning in message and results[1]["warnings"] == []


def refused(report: str) -> str:
    try:
        build(Case(dynmo={"report": report}))
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def test_a_report_that_cannot_be_opened_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    path = tmp_path / "file" / "report.jsonl"
    for message in run(2, refused, str(path)):
        assert message.startswith(f'dynmo.report = "{path}": cannot be written: ')


def with_a_report_on_one_rank(paths: list[str | None]) -> float:
    """Train a batch with a report path per rank, or None, and return the loss."""
    report = paths[int(os.environ["RANK"])]
    engine = build(Case(dynmo={"interval": 0, "report": report, "timeout_seconds": 10.0}))
    return float(engine.train_batch(batches(engine)).item())


def test_one_rank_alone_may_have_a_report(tmp_path: Path) -> None:
    """As in scripts that configure a report only on rank 0."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    plain = run(2, with_a_report_on_one_rank, [None, None])
    assert run(2, with_a_report_on_one_rank, [str(first), None], seconds=30.0) == plain
    assert run(2, with_a_report_on_one_rank, [None, str(second)], seconds=30.0) == plain
    assert first.exists() and not second.exists()


def with_a_block_of_its_own(blocks: list[dict[str, Any]]) -> str:
    try:
        build(Case(dynmo=blocks[int(os.environ["RANK"])]))
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def test_all_other_keys_must_be_equal_on_every_rank(tmp_path: Path) -> None:
    def found(*blocks: dict[str, Any]) -> list[str]:
        return run(2, with_a_block_of_its_own, list(blocks), seconds=30.0)

    seeds = [{"randomness": {"seed": rank}} for rank in range(2)]
    for message in found(*seeds):
        assert message.startswith(
            "rank 1: dynmo.randomness = RandomnessConfig(per_layer=True, seed=1) here, on rank 0 "
        )
    for message in found({}, {"trace": {"path": str(tmp_path / "trace"), "steps": [1, 2]}}):
        assert message.startswith("rank 1: dynmo.trace = TraceConfig(")
    traces = [{"trace": {"path": str(tmp_path / str(rank)), "steps": [1, 2]}} for rank in range(2)]
    assert found(*traces) == ["nothing was raised"] * 2
    assert found({"log": False, "monitor": False}, {}) == ["nothing was raised"] * 2


def test_a_full_disk_gives_one_warning() -> None:
    check_trained_on(run(2, train, "/dev/full", {}, None), "/dev/full: was not written: [Errno 28] No space left")
    trace = {"path": "/dev/full", "steps": [1, 3]}
    results = run(2, train, None, {}, None, False, trace)
    check_trained_on(results, "/dev/full: was not written: [Errno 28] No space left")


def test_a_report_continues_when_its_path_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    check_trained_on(run(2, train, str(path), {}, str(path), True), f"{path}: was not written: [Errno 21] Is a dir")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "rebalance"] == [1, 3]


def test_a_monitor_that_fails_gives_one_warning(tmp_path: Path) -> None:
    """DeepSpeed writes its own numbers through it, too, in every batch."""
    monitors = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    results = run(2, train, None, monitors, str(tmp_path / "job"), True)
    check_trained_on(results, "csv_monitor: was not written: [Errno 20] Not a directory")
    rows = (tmp_path / "job" / "DynMo_layers_moved.csv").read_text().splitlines()
    assert rows == ["step,layers_moved", "6,1", "18,3"]
    losses = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in losses[1:]] == ["6", "18"]
