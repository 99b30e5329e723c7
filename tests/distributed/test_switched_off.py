"""``"enabled": false``: training begins where ``initial_partition`` says, and no layer moves after that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.distributed import switched_off_workloads as work
from tests.distributed import workloads
from tests.distributed.harness import run, run_each
from tests.distributed.workloads import Case

BY_PROFILE: dict[str, Any] = {"enabled": False, "initial_partition": "profile", "interval": 1}
PLACED = (2, "initial", (0, 4, 8), (0, 7, 8))


def test_it_begins_where_the_block_says() -> None:
    case = Case(start=(0, 7, 8), dynmo={"enabled": False, "interval": 1})
    assert [partition for _, partition in run(2, workloads.partition_of, case)] == [[0, 7, 8]] * 2


def test_by_profile_it_profiles_once_moves_once_and_never_again(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    repack = {"enabled": True, "release": "park", "max_slowdown": 0.99}
    results = run(2, work.train, {**BY_PROFILE, "repack": repack, "report": str(report)}, 8)
    assert results == [{"moves": [PLACED], "repacks": 0}] * 2
    records = map(json.loads, report.read_text().splitlines())
    assert [(one["kind"], one["step"]) for one in records] == [("measured", 2), ("rebalance", 2), ("profile", 2)]


def test_what_would_move_layers_is_refused() -> None:
    still, placed = run_each(2, work.refusals, ({"enabled": False},), (BY_PROFILE,))
    rebalance = "dynmo.enabled = false: engine.rebalance would move layers; set it to true"
    assert still == [[rebalance]] * 2
    for messages in placed:
        assert messages[0] == rebalance
        assert messages[1].startswith("engine.compile")
        assert messages[1].endswith('or set dynmo.initial_partition to other than "profile"')


def test_a_resumed_run_stays_where_its_profile_put_it(tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = run(2, work.save, BY_PROFILE, folder, 3)
    assert [result["decisions"] for result in saved] == [[PLACED]] * 2
    resumed, weights_only = run_each(2, work.load, (BY_PROFILE, folder, 2, False), (BY_PROFILE, folder, 2, True))
    assert resumed == [{**result, "decisions": []} for result in saved]
    assert [result["decisions"] for result in weights_only] == [[PLACED]] * 2  # a run that begins, with these weights


def test_a_run_that_its_profile_did_not_put_there_is_profiled_once(tmp_path: Path) -> None:
    early, elsewhere = str(tmp_path / "early"), str(tmp_path / "elsewhere")
    assert run(2, work.save, BY_PROFILE, early, 1)[0]["decisions"] == [PLACED]
    assert run(2, work.save, {"interval": 3}, elsewhere, 3)[0]["partition"] == [0, 7, 8]
    began, moved = run_each(2, work.load, (BY_PROFILE, early, 2, False), (BY_PROFILE, elsewhere, 2, False))
    assert [result["decisions"] for result in began] == [[PLACED]] * 2
    assert [result["decisions"] for result in moved] == [[(5, *PLACED[1:])]] * 2
    others = run(3, work.load, BY_PROFILE, early, 3, False)
    assert all([(step, why) for step, why, *_ in result["decisions"]] == [(3, "initial")] for result in others)
