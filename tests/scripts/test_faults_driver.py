"""The driver of faults draws all of them, each happens, and what goes wrong is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import fault as faults
from tests.faults.__main__ import random_fault
from tests.faults.fault import ON_FIRST, PLACES, Fault, kinds_at, owner_of
from tests.faults.trial import CASES, Notes, Undisturbed, _problem, section, train, try_fault
from tests.support.harness import End, run

KILL = Fault(1, 2, "move: commit", "SIGKILL")


def test_every_pair_of_a_place_and_a_kind_is_drawn() -> None:
    drawn = [random_fault(seed)[0] for seed in range(len(PLACES) * len(faults.KINDS))]
    assert {(fault.place, fault.kind) for fault in drawn} == {(place, k) for place in PLACES for k in kinds_at(place)}
    assert all(fault.rank == 0 for fault in drawn if fault.place in ON_FIRST)


def test_every_place_is_a_function() -> None:
    for path in PLACES.values():
        if not path.startswith("engine:"):
            owner, name = owner_of(path, None)
            assert callable(getattr(owner, name))


def come_to_places(folder: str) -> set[str]:
    """Train as a trial does. Return the places to which this rank came."""
    came: set[str] = set()

    class Everywhere:
        def inject(self, engine: Any, happens: Any) -> None:
            for place in PLACES:
                faults.KINDS[place] = lambda *_, place=place: came.add(place)
                Fault(faults.dist.get_rank(), 0, place, place).inject(engine)

    train(replace(CASES["fp32"], dynmo=section(background=True)), folder, "all", Everywhere())  # type: ignore[arg-type]
    return came


@pytest.mark.ranks
@pytest.mark.nightly
def test_a_trial_comes_to_every_place(tmp_path: Path) -> None:
    ranks = run(3, come_to_places, str(tmp_path), complete=False)
    assert set.union(*ranks) == set(PLACES)
    assert ranks[0] - set.union(*ranks[1:]) == ON_FIRST


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize("fault", [KILL, Fault(1, 3, "save: describe a file", "a file cut")], ids=lambda f: f.kind)
def test_a_trial_finds_nothing_wrong(tmp_path: Path, fault: Fault) -> None:
    undisturbed = Undisturbed.of("fp32", tmp_path / "undisturbed")
    (tmp_path / "trial").mkdir()
    outcome = try_fault(fault, "fp32", 0, tmp_path / "trial", undisturbed)
    assert outcome.happened and not outcome.problem and bool(outcome.ended) == (fault.kind == "SIGKILL")
    said = Notes(str(tmp_path / "trial"), "fault").all("harmless")
    assert any("global_step2 is loaded" in text for text in said) == (fault.kind == "a file cut")


@pytest.mark.parametrize(
    ("fault", "notes", "changed", "ended", "problem"),
    [
        (KILL, [("said", [0, "rank 1 (host a) has ended"])], {}, "exit code -9", ""),
        (KILL, [], {}, "exit code -9", "said: []"),
        (KILL, [("said", [0, "rank 2 (host a) has ended"])], {}, "exit code -9", "said: ['rank 2 (host a) has ended']"),
        (KILL, [("saved", 4)], {}, "exit code -9", "resumed before the last checkpoint, 4"),
        (KILL, [("loss", [2, 0.5])], {}, "", "losses differ: {2: 0.5}, undisturbed: {2: 1.5}"),
        (KILL, [], {"losses": {2: 0.5}}, "", "losses differ: {2: 0.5}, undisturbed: {2: 1.5}"),
        (KILL, [], {"state": {"0.weight": b"ac", "shards": {}}}, "", "weights or optimizer state differ"),
        (replace(KILL, kind="a file cut"), [("happened", 1.0)], {}, "", "nothing refused the file: []"),
        (replace(KILL, kind="a file cut"), [("happened", 1.0), ("harmless", "a.pt: is cut")], {}, "", ""),
        (replace(KILL, kind="a file flipped"), [], {}, "KeyError", "a damaged file ended it: KeyError"),
    ],
)
def test_what_goes_wrong_is_found(
    tmp_path: Path, fault: Fault, notes: list[Any], changed: dict[str, Any], ended: str, problem: str
) -> None:
    result = {"losses": {2: 1.5}, "state": {"0.weight": b"ab", "shards": {}}, "replica": 0}
    made = Notes(str(tmp_path), "fault")
    for what, value in notes:
        made.add(what, value)
    undisturbed = Undisturbed({2: 1.5}, {"0.weight": b"ab"})
    ends = [End(None, "RankLostError", 1, 0.0), End(None, "", -9, 0.0)]
    assert _problem([{**result, **changed}], undisturbed, made, ends, ended, fault) == problem
