"""One rank's own code may keep it between two batches for longer than ``timeout_seconds``, as in stock DeepSpeed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import Case
from tests.support.harness import run
from tests.support.training import batches, build

pytestmark = pytest.mark.ranks

OURS_SECONDS, PAUSE_SECONDS = 2.0, 2.5
SECTION: dict[str, Any] = {"interval": 0, "timeout_seconds": OURS_SECONDS, "checkpoint": "background"}

Call = Callable[[Any, Any, str], Any]


def train(engine: Any, data: Any, folder: str) -> None:
    engine.train_batch(data)


AFTER_A_PAUSE: dict[str, Call] = {
    "a batch during which layers move and a save ends": train,
    "a save": lambda engine, data, folder: engine.save_checkpoint(folder, tag="after"),
    "a decision": lambda engine, data, folder: engine.rebalance(),
    "a given partition": lambda engine, data, folder: engine.rebalance([0, 3, 8]),
    "a change of the model": lambda engine, data, folder: engine.model_changed("a test"),
    "a load": lambda engine, data, folder: engine.load_checkpoint(folder, tag="before"),
    "a re-packing": lambda engine, data, folder: engine.repack(1),
}
SHORT = list(AFTER_A_PAUSE)[:2]


def paused(case: Case, calls: list[str], folder: str) -> tuple[list[str], list[int]]:
    """Train, and let one rank come later than the others to each of ``calls``."""
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    done = []
    for call in calls:
        engine.rebalance([0, 2, 8], background=True)
        engine.save_checkpoint(folder, tag="before")
        if engine.global_rank == 1:
            time.sleep(PAUSE_SECONDS)
        AFTER_A_PAUSE[call](engine, data, folder)
        done.append(call)
        if not engine.released:
            engine.train_batch(data)
    return done, engine.partition


@pytest.mark.parametrize("calls", [SHORT, pytest.param(list(AFTER_A_PAUSE), marks=pytest.mark.nightly)])
def test_a_rank_that_pauses_between_two_batches_ends_nothing(tmp_path: Path, calls: list[str]) -> None:
    for done, _ in run(2, paused, Case(dynmo=SECTION), calls, str(tmp_path)):
        assert done == calls
