"""The breakages can be applied to the code as it is, and random ones are found again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS
from tests.mutations.choice import chosen_tests
from tests.mutations.equivalent import CAUGHT_BY, EQUIVALENT
from tests.mutations.random_lines import Breakage, breakages
from tests.mutations.reach import Reach

ROOT = Path(__file__).resolve().parents[2]


def test_mutations_apply() -> None:
    for mutation in MUTATIONS:
        assert mutation.anchor != mutation.new
        path, broken = mutation.broken(ROOT)
        compile(broken, path, "exec")
        _check_that_they_exist(mutation.names, mutation.name)


def _check_that_they_exist(tests: Sequence[str], name: str) -> None:
    assert tests, name
    for file, _, function in (test.partition("::") for test in tests):
        assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text(), name


def test_names_of_mutations_differ() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)


def test_random_breakages_apply_and_are_of_forty_modules() -> None:
    found = breakages(ROOT)
    assert len(found) >= 200 and len({each.file for each in found}) == 40
    assert len({each.name for each in found}) == len(found)
    for each in found:
        path, broken = each.broken(ROOT)
        assert broken != path.read_text()
        compile(broken, path, "exec")
    assert not {*EQUIVALENT, *CAUGHT_BY} - {each.name for each in found}, "these are not broken any more"
    assert not set(EQUIVALENT) & set(CAUGHT_BY)
    for name, tests in CAUGHT_BY.items():
        _check_that_they_exist(shlex.split(tests), name)


SMALL = '''
def largest(values):
    """Say 3."""
    found = 0
    for value in values:
        if value > found and not found < 0:
            found = value
        log.info("%d", 1)
    values.clear()
    return found if found else 1
'''
KEPT = """
SIZE = 5
if SIZE:
    SIZE += 1


class Kept:
    size = 6

    def take(self, value):
        import os

        assert value >= 7
        if TYPE_CHECKING:
            value: int
        try:
            self.size, place = value <= self.size, True
            self.size = max(
                value, place
            )
        except KeyError:
            del self.size
        match value:
            case True:
                raise ValueError(0.5 < value < 1.5, é := "é" >= "b")
"""
BROKEN = {  # what is replaced, by what, and what that is called
    SMALL: [
        ("= 0", "= 1", "largest: off by one: 0 -> 1 in found = 0"),
        (
            "if value > found and not found < 0",
            "if (not (value > found and not found < 0))",
            "largest: inverted: value > found and not found < 0",
        ),
        ("> found", ">= found", "largest: off by one: value > found -> value >= found in {if}"),
        ("< 0", "<= 0", "largest: off by one: found < 0 -> found <= 0 in {if}"),
        ("< 0", "< 1", "largest: off by one: 0 -> 1 in {if}"),
        ("values.clear()", "pass", "largest: dropped: values.clear()"),
        ("found if found", "found if (not (found))", "largest: inverted: found"),
        ("else 1", "else 2", "largest: off by one: 1 -> 2 in return found if found else 1"),
    ],
    KEPT: [
        (
            "value <= self.size",
            "value < self.size",
            "Kept.take: off by one: value <= self.size -> value < self.size "
            "in self.size, place = value <= self.size, True",
        ),
        (
            "self.size = max(\n                value, place\n            )",
            "pass",
            "Kept.take: dropped: self.size = max( value, place )",
        ),
        ("del self.size", "pass", "Kept.take: dropped: del self.size"),
        ('raise ValueError(0.5 < value < 1.5, é := "é" >= "b")', "pass", "Kept.take: dropped: {raise}"),
        ('"é" >= "b"', '"é" > "b"', 'Kept.take: off by one: "é" >= "b" -> "é" > "b" in {raise}'),
    ],
}
LINES = {
    "{if}": "if value > found and not found < 0:",
    "{raise}": 'raise ValueError(0.5 < value < 1.5, é := "é" >= "b")',
}


def test_kinds_of_random_breakages(tmp_path: Path) -> None:
    """What is logged is not broken, nor are assertions, imports, docstrings, and what is outside of functions."""
    module = tmp_path / "ds_dynmo" / "small.py"
    module.parent.mkdir()
    for text, broken in BROKEN.items():
        module.write_text(text)
        seeds = (breakages(tmp_path, seed, per_module=30) for seed in range(60))
        every = {each.name: each for found in seeds for each in found}
        expected = {}
        for old, new, name in broken:
            for short, line in LINES.items():
                name = name.replace(short, line)
            expected[f"small.py {name}"] = text.replace(old, new)
        assert {name: each.broken(tmp_path)[1] for name, each in every.items()} == expected
        for each in every.values():
            assert each.old in "\n".join(text.splitlines()[each.first - 1 : each.last]), each.name


def test_a_change_elsewhere_chooses_no_other_lines(tmp_path: Path) -> None:
    """Some of each of the largest modules, on different lines."""
    small, large, tiny = (tmp_path / "ds_dynmo" / name for name in ("small.py", "inner/large.py", "tiny.py"))
    large.parent.mkdir(parents=True)
    small.write_text(SMALL), large.write_text(SMALL + KEPT), tiny.write_text("def one():\n    return 1\n")
    first = breakages(tmp_path, modules=2, per_module=3)
    assert [each.file for each in first] == ["ds_dynmo/inner/large.py"] * 3 + ["ds_dynmo/small.py"] * 3
    for each, other in zip(first, first[1:]):
        assert each.file != other.file or each.last < other.first
    assert len({tuple(each.name for each in breakages(tmp_path, seed, 1, 3)) for seed in range(9)}) > 1
    large.write_text("import os\n" + SMALL + KEPT + "x = 1\n")
    again = breakages(tmp_path, modules=2, per_module=3)
    assert [each.name for each in again] == [each.name for each in first]
    assert [each.first for each in again[:3]] == [each.first + 1 for each in first[:3]]


def test_tests_that_catch_a_random_breakage_are_tried_before_quicker_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "ds_dynmo/small.py"
    breakage = Breakage(file, "largest", "dropped", 0, 0, 7, 7, "values.clear()", "pass", "values.clear()")
    seconds = {"tests/a.py::one": 1.0, "tests/a.py::two[x y]": 90.0, "tests/b.py::three": 95.0, "tests/c.py::four": 2.0}
    known = Reach({file: {7: {0, 1, 2}}}, list(seconds), seconds)
    assert chosen_tests(breakage, file, 7, 7, known, budget=95.0) == ["tests/a.py::one", "tests/a.py::two[x y]"]
    monkeypatch.setitem(CAUGHT_BY, breakage.name, "tests/b.py 'tests/a.py::two[x y]'")
    assert sorted(chosen_tests(breakage, file, 7, 7, known, budget=95.0)) == [
        "tests/a.py::two[x y]",
        "tests/b.py::three",
    ]
    monkeypatch.setitem(CAUGHT_BY, breakage.name, "tests/c.py::four")
    assert chosen_tests(breakage, file, 7, 7, known, budget=4.0) == ["tests/c.py::four", "tests/a.py::one"]
