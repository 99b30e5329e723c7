"""scripts/repack.py freezing: a run of layers that sleep, which ds-dynmo-plot draws."""

from __future__ import annotations

from pathlib import Path

import repack
from ds_dynmo.cli.plotting.data import read_report
from tests.distributed.harness import run


def train(report: str) -> None:
    sizes = ["--layers", "4", "--micro-batches", "2", "--forward-ms", "4", "--steps", "12"]
    repack.freezing(repack.parse(["freezing", report, *sizes]))


def test_layers_freeze_and_a_rank_is_released(tmp_path: Path) -> None:
    run(2, train, str(tmp_path / "report.jsonl"))
    report = read_report(tmp_path / "report.jsonl")
    reasons = dict.fromkeys(change["reason"] for change in sorted(report.changes, key=lambda change: change["step"]))
    assert list(reasons) == [f"freezing: first {count} layers" for count in (1, 2, 3)]
    assert report.repacks[-1]["new_partition"] == [0, 4]
