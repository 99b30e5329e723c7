"""Runs whose reports cannot be written; every function here runs on a rank."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from ds_dynmo.errors import ConfigError
from tests.distributed.workloads import Case, batches, build, state

MOVES = ([0, 3, 8], [0, 5, 8], [0, 2, 8])


class Warnings(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("DynMo").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def refused(report: str) -> str:
    try:
        build(Case(dynmo={"report": report}))
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def with_a_report_on_one_rank(paths: list[str | None]) -> float:
    """The loss of a batch; each rank has a path of its own, or none."""
    report = paths[int(os.environ["RANK"])]
    engine = build(Case(dynmo={"interval": 0, "report": report, "timeout_seconds": 10.0}))
    return float(engine.train_batch(batches(engine)).item())


def with_a_block_of_its_own(blocks: list[dict[str, Any]]) -> str:
    try:
        build(Case(dynmo=blocks[int(os.environ["RANK"])]))
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def train(report: str | None, monitors: dict[str, Any], lost: str | None, back: bool = False) -> dict[str, Any]:
    """Three batches, each with a rebalance after it.

    Args:
        lost: a path in whose place there is something else from the second batch on.
        back: until the third.
    """
    warnings = Warnings()
    engine = build(Case(dynmo={"interval": 0, "report": report}), more=monitors)
    data, losses = batches(engine), []
    for step, move in enumerate(MOVES):
        if lost is not None and engine.global_rank == 0:
            if step == 1:
                _take_away(Path(lost))
            elif step == 2 and back:
                _give_back(Path(lost))
        losses.append(engine.train_batch(data).item())
        engine.rebalance(move)
    return {"losses": losses, "state": state(engine), "warnings": warnings.messages, "reports": len(engine.reports)}


def _kept(path: Path) -> Path:
    return path.with_name("kept")


def _take_away(path: Path) -> None:
    """A folder stands where there was a file, a file where there was a folder."""
    was_file = path.is_file()
    path.rename(_kept(path))
    path.mkdir() if was_file else path.write_text("no folder")


def _give_back(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    _kept(path).rename(path)
