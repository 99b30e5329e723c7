"""A decision that takes long is calculated while the next batch trains, and carried out at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ds_dynmo.engine.balancing import background
from tests.distributed.harness import run, run_each
from tests.distributed.support import told_clock
from tests.distributed.support.told_clock import unsteady_engine
from tests.distributed.support.training import gather
from tests.distributed.test_schedule_decisions import SECONDS, SplitLayer


def engine_whose_decisions(take_long: bool, **block: Any) -> Any:
    told_clock.UnsteadyLayer = SplitLayer  # type: ignore[misc]
    background._LONG = 0 if take_long else 10**9
    block = {"interval": 3, "schedule": {"kind": "zero_bubble"}, "min_improvement": 0.0, **block}
    return unsteady_engine(block, SECONDS, [1.0] * 3, 0.0)


def trained(take_long: bool, kill_on: int | None = None) -> Any:
    engine, data = engine_whose_decisions(take_long)
    losses = []
    for step in range(1, 9):
        losses.append(float(engine.train_batch(data)))
        if step == 3 and torch.distributed.get_rank() == kill_on:
            engine.balancer._process._process.kill()
    reports = [(one.step, one.new_partition, one.schedule, one.search_seconds) for one in engine.reports]
    return gather((losses, reports, engine.stage.schedule.found.hash, engine.partition))


def test_it_is_carried_out_a_batch_later_and_changes_nothing_else() -> None:
    at_once, later, failing = (results[0] for results in run_each(3, trained, (False,), (True,), (True, 1)))
    for result in (at_once, later, failing):
        assert all(theirs[2:] == at_once[0][2:] for theirs in result), "ranks differ"
        assert all(theirs[0] == at_once[0][0] for theirs in result), "losses differ"
        assert [one[1:3] for one in result[0][1]] == [one[1:3] for one in at_once[0][1]]
    assert at_once[0][1][0][1] != (0, 2, 4, 7), "nothing moves"
    assert [(one[0], one[3]) for one in at_once[0][1]] == [(3, None), (6, None)]
    assert [one[0] for one in later[0][1]] == [one[0] for one in failing[0][1]] == [4, 7]
    seconds = [[one[3] is not None for one in theirs[1]] for theirs in later]
    assert seconds == [[True, True]] * 3
    assert [[one[3] is not None for one in theirs[1]] for theirs in failing] == [[True, True], [False] * 2, [True] * 2]


def interrupted(folder: str) -> Any:
    """What is reported where something comes between a decision and its batch."""
    engine, data = engine_whose_decisions(True, repack={"release": "park"})
    seen: dict[str, Any] = {}

    def after(what: str, batches: int = 2) -> None:
        known = len(engine.reports)
        for _ in range(batches):
            engine.train_batch(data)
        seen[what] = [(one.step, one.reason, one.search_seconds is not None) for one in engine.reports[known:]]

    def begin() -> None:
        while engine.balancer._begun is None:
            engine.train_batch(data)

    begin()  # after batch 3
    engine.model_changed("a test")
    after("model changed")
    begin()  # 6
    engine.rebalance([0, 1, 2, 7])
    after("explicit")
    begin()  # 9
    engine.rebalance()
    after("by hand")
    begin()  # 12
    engine.save_checkpoint(folder)
    after("saved")
    begin()  # 15
    engine.load_checkpoint(folder)
    after("loaded", batches=4)  # from batch 12
    begin()  # 18
    engine.repack(partition=[0, 3, 7])
    if not engine.released:
        after("re-packed")
        begin()
        engine.load_checkpoint(folder)
        after("loaded on fewer stages")  # from batch 12
    return engine.released, seen, engine.balancer._process._process is not None


def test_what_comes_in_between_drops_it(tmp_path: Path) -> None:
    results = run(3, interrupted, str(tmp_path))
    remaining = [result for result in results if not result[0]]
    assert len(remaining) == 2 and all(result[1] == remaining[0][1] for result in remaining), "ranks differ"
    assert remaining[0][1] == {
        "model changed": [(5, "a test", True)],  # from the profile of batch 4
        "explicit": [],
        "by hand": [],
        "saved": [(13, "interval", True)],  # not dropped
        "loaded": [(14, "interval", True), (16, "interval", True)],  # what was pending when it was saved, and step 15's
        "re-packed": [],
        "loaded on fewer stages": [(14, "interval", True)],  # from the profile of batch 13
    }
    assert [result[2] for result in results if result[0]] == [False]
