"""Breakages are tried: what tests run is recorded, and who is asked, until one fails; what came of it is counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations import __main__ as command
from tests.mutations.__main__ import Outcome, run, table
from tests.mutations.choice import chosen_tests
from tests.mutations.equivalent import EQUIVALENT
from tests.mutations.mutation import Mutation
from tests.mutations.random_lines import Breakage
from tests.mutations.reach import FOLDER, Reach, compare, joined
from tests.mutations.reach import main as reach_main

ROOT = Path(__file__).resolve().parents[2]
RECORD = """
from tests.mutations.reach import recorded

with recorded("a.py::one (call)"):
    import ds_dynmo.errors
with recorded("a.py::two (call)"):
    import ast
"""


@pytest.mark.parametrize("asked", [True, False])
def test_what_a_process_runs_of_the_package_is_recorded_where_it_is_asked_for(asked: bool, tmp_path: Path) -> None:
    environment = {**os.environ, FOLDER: str(tmp_path) if asked else ""}
    subprocess.run([sys.executable, "-c", RECORD], cwd=ROOT, env=environment, check=True)
    records = [json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert [record["test"] for record in records] == ["a.py::one (call)", "a.py::two (call)"] * asked
    if asked:
        assert records[0]["lines"]["ds_dynmo/errors.py"] and records[1]["lines"] == {}
        assert all(file.startswith("ds_dynmo/") for file in records[0]["lines"])


def test_what_sets_up_a_fixture_counts_for_every_test_of_its_file() -> None:
    records = [
        {"test": "a.py::one[x (y)] (setup)", "lines": {"m.py": [1]}},
        {"test": "a.py::two (call)", "lines": {"m.py": [2]}},
        {"test": "inner.py::test (call)", "lines": {"m.py": [3]}},
    ]
    found = joined(Reach(seconds={"a.py::one[x (y)]": 1.0, "a.py::two": 2.0, "b.py::three": 3.0}), records)
    assert found.of("m.py", 1, 1) == ["a.py::one[x (y)]", "a.py::two"] and found.of("m.py", 2, 2) == ["a.py::two"]
    assert found.of("m.py", 3, 3) == [], "of tests that tests run"


def test_a_record_names_the_tests_that_run_a_line_and_lines_that_none_runs_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = "ds_dynmo/placement.py"
    before = Reach({file: {1: {0, 1}, 2: {1}, 3: {2}}}, ["slow", "quick", "other"], {"slow": 2.0, "quick": 1.0})
    before.save(tmp_path / "record.json")
    assert Reach.load(tmp_path / "record.json") == before
    assert before.of(file, 1, 2) == ["quick", "slow"] and before.of("ds_dynmo/errors.py", 1, 2) == []
    (lost,) = compare(before, Reach({file: {1: {0}, 2: {0}}}, ["slow"], {}))
    assert lost.startswith(f"{file}:3:")
    Reach({file: {1: {0}, 2: {0}}}, ["slow"], {}).save(tmp_path / "after.json")
    records = [str(tmp_path / f"{name}.json") for name in ("record", "after")]
    assert reach_main(["--compare", *records]) == 1 and reach_main(["--compare", *records[::-1]]) == 0
    assert capsys.readouterr().out == f"{lost}\n1 lines are not run any more\n0 lines are not run any more\n"
    assert reach_main([]) == reach_main(["--help"]) == 2


# -- the command ------------------------------------------------------------------------------------------------------

FILE = "ds_dynmo/engine/run/small.py"
FAR, SLOW, QUICK, LONG = (
    *("tests/cli/test_far.py::one", "tests/engine/run/test_near.py::slow"),
    *("tests/engine/run/test_near.py::quick", "tests/engine/test_long.py::long"),
)
NAMED = ["tests/x/test_named.py::named[a b]", "tests/x/test_named.py::named[c]"]
KNOWN = Reach(
    {FILE: {2: {0, 1, 2, 3}, 3: {3}}},
    [FAR, SLOW, QUICK, LONG, *NAMED, "tests/x/test_named.py::named_too"],
    {FAR: 1.0, SLOW: 5.0, QUICK: 2.0, LONG: 200.0, NAMED[0]: 70.0, NAMED[1]: 60.0},
)
LARGEST = "def largest(values):\n    return max(values)\n"
MUTATION = Mutation("the least is the largest", "small.largest", "max", "min", "tests/x/test_named.py::named")
PIECE = Breakage(FILE, "largest", "dropped", 25, 43, 2, 2, "return max(values)", "pass", "return max(values)")


def test_those_that_are_named_are_asked_first_then_those_near_by_each_by_their_seconds() -> None:
    """In as many seconds as there are for a breakage; those that are named in any case, and one."""
    assert chosen_tests(PIECE, FILE, 1, 2, KNOWN, 100.0) == [QUICK, SLOW, FAR]
    assert chosen_tests(PIECE, FILE, 3, 3, KNOWN, 100.0) == [LONG]
    assert chosen_tests(PIECE, FILE, 9, 9, KNOWN, 100.0) == []
    assert chosen_tests(MUTATION, FILE, 9, 9, KNOWN, 100.0) == NAMED
    known = Reach(KNOWN.lines, KNOWN.tests, {**KNOWN.seconds, NAMED[0]: 1.0, NAMED[1]: 1.0})
    assert chosen_tests(MUTATION, FILE, 1, 2, known, 100.0) == [*NAMED, QUICK, SLOW, FAR]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text(LARGEST)
    return tmp_path


@pytest.mark.parametrize(
    ("status", "kind"), [(1, "caught"), (2, "caught"), (None, "caught"), (0, "MISSED"), (5, "NOT RUN")]
)
def test_a_breakage_is_caught_if_a_test_fails_or_none_ends(
    status: int | None, kind: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str], str]] = []

    def pytest_in(folder: Path, tests: list[str], accelerator: str) -> tuple[int | None, str]:
        asked.append(((folder / FILE).read_text(), tests, accelerator))
        return status, "what pytest says"

    monkeypatch.setattr(command, "pytest_in", pytest_in)
    device = Mutation("of a device", "small.largest", "max", "min", "tests/a.py::b", accelerator="emulated")
    outcomes = [run("topic", each, checkout, KNOWN, 100.0) for each in (MUTATION, PIECE, device)]
    assert [outcome.kind for outcome in outcomes] == [kind] * 3
    assert all(("what pytest says" in outcome.line) == (status is not None) for outcome in outcomes)
    broken = LARGEST.replace("max", "min").rstrip("\n")
    assert [(text.rstrip("\n"), accelerator) for text, _, accelerator in asked] == [
        *((broken, "cpu"), (LARGEST.replace("return max(values)", "pass").rstrip("\n"), "cpu"), (broken, "emulated"))
    ]
    assert [tests[0] for _, tests, _ in asked] == [NAMED[0], QUICK, "tests/a.py::b"]
    assert (checkout / FILE).read_text() == LARGEST


def test_what_is_not_tried_is_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "pytest_in", pytest.fail)
    unknown = run("topic", MUTATION, checkout, Reach(), 100.0)
    assert (unknown.kind, unknown.line) == ("MISSED", "no quick test runs it")
    gone = run("topic", Mutation("gone", "small.largest", "maximum", "min", "tests/a.py"), checkout, KNOWN, 100.0)
    assert gone.kind == "DOES NOT APPLY" and "maximum occurs 0 times" in gone.line
    monkeypatch.setitem(EQUIVALENT, PIECE.name, "nobody sees it")
    same = run("random", PIECE, checkout, KNOWN, 100.0)
    assert (same.kind, same.line) == ("equivalent", "nobody sees it")


@pytest.mark.parametrize(
    ("promises", "of_lines", "code"),
    [
        (["caught"], ["caught"] * 19 + ["MISSED"], 0),
        (["caught"], ["caught"] * 18 + ["MISSED"] * 2, 1),
        (["caught"], ["caught"] * 18 + ["equivalent"] + ["MISSED"], 1),  # of 19 that were tried
        *((["caught", kind], [], 1) for kind in ("MISSED", "NOT RUN", "DOES NOT APPLY")),
        ([], [], 1),  # no name has these words
    ],
)
def test_every_promise_is_to_be_caught_and_most_of_the_random_lines(
    promises: list[str],
    of_lines: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds = [*(("moves", kind) for kind in promises), *(("random", kind) for kind in of_lines)]
    outcomes = [Outcome(topic, f"{topic} {at}", kind, "line", 2.0) for at, (topic, kind) in enumerate(kinds)]
    monkeypatch.setattr(command, "breakages", lambda root: [])
    monkeypatch.setattr(command, "outcomes_of", lambda chosen, *_: iter(outcomes[: len(chosen) * 100]))
    KNOWN.save(tmp_path / "record.json")
    words = ["moves"] if outcomes else ["no breakage has this name"]
    assert command.main(["--reach", str(tmp_path / "record.json"), *words]) == code
    missed = [
        f"not caught: {each.topic}: {each.name}" for each in outcomes if each.kind not in ("caught", "equivalent")
    ]
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("not caught")] == missed


def test_the_table_counts_what_was_caught_and_missed() -> None:
    kinds = [("moves", "caught"), ("moves", "NOT RUN"), ("random", "equivalent"), ("random", "MISSED")]
    rows = [line.split() for line in table([Outcome(topic, "", kind, "", 1.5) for topic, kind in kinds]).splitlines()]
    assert rows == [
        ["topic", "breakages", "caught", "missed", "equivalent", "seconds"],
        *(["moves", "2", "1", "1", "0", "3"], ["random", "2", "0", "1", "1", "3"], ["all", "4", "1", "2", "1", "6"]),
    ]


def test_words_choose_breakages_by_topic_or_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "breakages", lambda root: [PIECE])

    def listed(*words: str) -> list[str]:
        assert command.main(["--list", *words]) == 0
        return capsys.readouterr().out.splitlines()

    name = "two groups of ranks that differ alike cancel out"
    (line,) = listed(name)
    assert re.fullmatch(rf"moves: {name}: tests/\S+", line)
    assert listed("random", name) == [line, f"random: {PIECE.name}: "]
    assert len(listed()) > len(listed("moves")) > 10


TEST = "tests/engine/comm/test_tree.py::test_two_groups_that_differ_alike_do_not_cancel_out"


@pytest.mark.nightly
def test_a_breakage_is_recorded_tried_and_caught_on_ranks(tmp_path: Path) -> None:
    """Of another one, no test of the record runs the lines."""
    record = tmp_path / "record.json"
    assert reach_main([str(record), "-n", "0", "-q", TEST]) == 0
    known = Reach.load(record)
    assert known.tests == [TEST] and known.seconds[TEST] > 0 and "ds_dynmo/engine/comm/agreement.py" in known.lines
    names = ["two groups of ranks that differ alike cancel out", "makespan takes a longer iteration"]
    asked = [sys.executable, "-m", "tests.mutations", "--reach", str(record), "--jobs", "1", *names]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(rf"moves: {names[0]}: caught \(\d+ s\)\n    FAILED {TEST}", done.stdout), done.stdout
    assert f"decisions: {names[1]}: MISSED" in done.stdout and "no quick test runs it" in done.stdout
