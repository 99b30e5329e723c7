"""The driver of random rounds finds what it is to find: differences, hangs, leftovers and growth."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.endurance import growth, leftovers, rounds, training
from tests.endurance.growth import Held
from tests.endurance.leftovers import Surroundings, parts_of_checkpoints
from tests.endurance.plan import random_round
from tests.endurance.rounds import Difference, Result, run_round
from tests.endurance.tally import Tally
from tests.support.harness import run

SEED = 0


@pytest.fixture
def server() -> Iterator[None]:
    """Start the server that forks ranks, which no round is to find as new."""
    run(1, training.nothing)
    yield


@pytest.mark.ranks
@pytest.mark.nightly
def test_a_round_trains_disturbed_as_undisturbed(server: None, tmp_path: Path) -> None:
    result = run_round(SEED, tmp_path / "round", 300.0)
    assert not result.failure and not (tmp_path / "round").exists()
    assert result.counts["steps"] >= random_round(SEED).steps and result.counts["moves"] > 0
    assert json.loads(result.line())["seed"] == SEED


@pytest.mark.ranks
def test_a_round_that_hangs_fails_and_leaves_its_folder(server: None, tmp_path: Path) -> None:
    result = run_round(SEED, tmp_path / "round", 0.01)
    assert "were not done in 0.01 s" in result.failure and "left behind" not in result.failure
    assert (tmp_path / "round").is_dir()


def test_the_same_seed_draws_the_same_round() -> None:
    drawn = [random_round(seed) for seed in range(50)]
    assert drawn == [random_round(seed) for seed in range(50)]
    assert len({type(each.case) for each in drawn}) == 2 and any(each.launches[0].death for each in drawn)
    assert all(each.launches[-1].death is None for each in drawn)


def outcome(**changed: Any) -> dict[str, Any]:
    end = {"evaluated": 1.5, "counters": (6, 36), "lr": [0.1], "state": {"0.weight": b"ab", "shards": {}}, "replica": 0}
    return {**end, **changed}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"state": {"0.weight": b"ac", "shards": {}}}, r"different state: \['0.weight'\]"),
        ({"state": {"0.weight": b"ab", "shards": {"0.weight/exp_avg": (0, b"a")}}}, "names in the state"),
        ({"evaluated": 1.25}, "evaluated: .1.25.; undisturbed: .1.5."),
        ({"counters": (6, 30)}, "counters"),
    ],
)
def test_a_difference_fails_a_round(changed: dict[str, Any], said: str) -> None:
    rounds._compare_ends([outcome()], [outcome()])
    with pytest.raises(Difference, match=said):
        rounds._compare_ends([outcome()], [outcome(**changed)])


def test_what_a_round_leaves_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leftovers, "PATIENCE_SECONDS", 0.0)
    surroundings = Surroundings.now()
    assert not surroundings.left()
    (tmp_path / "left").touch()
    (tmp_path / ".global_step2.writing").mkdir()
    assert surroundings.left() == sorted(map(str, tmp_path.iterdir()))
    assert parts_of_checkpoints(tmp_path) == [str(tmp_path / ".global_step2.writing")]


def test_growth_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    held = Held(mib=400.0, sockets=9, threads=15, files=30, groups=6)
    milestones = (10, 100, 1000)
    assert growth.report("flat", milestones, [[held, held, replace(held, mib=407.0)]])
    assert not growth.report("sockets", milestones, [[held, held, replace(held, sockets=10)]])
    assert not growth.report("memory", milestones, [[held, held, replace(held, mib=409.0)]])
    assert "rank 0: sockets grow: [9, 9, 10]" in capsys.readouterr().out


def test_the_table_adds_up_rounds_and_names_those_that_failed() -> None:
    tally = Tally()
    for seed, failure in ((3, ""), (4, "left behind")):
        tally.add(Result(seed, "", (), (), {"moves": 2}, 1800.0, failure))
    assert [line.split() for line in tally.table().splitlines()] == [
        ["moves", "4"],
        ["hours", "1.00"],
        ["failed:", "seeds", "4"],
        ["1", "of", "2", "rounds", "passed"],
    ]
