"""A run of any length keeps the latest reports; the file has all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_dynmo import DynMoConfig
from ds_dynmo.engine.decide.reporter import KEPT_REPORTS, Reporter
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MeasuredReport, RebalanceReport, reports_after

HERE = Placement.chain([0, 1, 2])


def decision(step: int) -> RebalanceReport:
    return RebalanceReport(step, "interval", HERE, HERE, None, None, None, None, 0, 0, 0.0, 0.0, 0.0)


def measurement(step: int) -> MeasuredReport:
    return MeasuredReport(step, None, HERE, 1.0, 0.0, 1.0, 0.0)


def reporter_of(rank: int, path: Path) -> Reporter:
    alone: Any = SimpleNamespace(enter=lambda what: None, broadcast_object=lambda value: value)
    config = DynMoConfig(report=str(path), log=False)
    return Reporter(config, alone, is_first_rank=rank == 0, monitor=SimpleNamespace(enabled=False))


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_keeps_the_latest_reports_and_writes_all(tmp_path: Path, rank: int) -> None:
    path, count = tmp_path / "report.jsonl", KEPT_REPORTS + 5
    reporter = reporter_of(rank, path)
    for step in range(count):
        reporter.rebalanced(decision(step), step)
        reporter.measured(measurement(step), step)
    for kept in (reporter.rebalances, reporter.measurements):
        assert [report.step for report in kept] == ([] if rank else [*range(5, count)])
    assert not path.exists() if rank else len(path.read_text().splitlines()) == 2 * count


def test_reports_that_are_new_are_found_when_older_ones_are_gone() -> None:
    first, second, third = decision(1), decision(2), decision(2)
    assert reports_after(None, [first, second]) == [first, second]
    assert reports_after(second, [second, third]) == [third]  # equal, but another
    assert reports_after(third, [second, third]) == []
    assert reports_after(first, [second, third]) == [second, third]
