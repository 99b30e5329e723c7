"""The breakages can be applied to the code as it is; random ones are found again; and what tests run is recorded."""

from __future__ import annotations

from pathlib import Path

from tests.mutations import MUTATIONS
from tests.mutations.equivalent import EQUIVALENT
from tests.mutations.random_lines import breakages
from tests.mutations.reach import Reach, compare, joined

ROOT = Path(__file__).resolve().parents[2]


def test_mutations_apply() -> None:
    for mutation in MUTATIONS:
        assert mutation.anchor != mutation.new
        path, broken = mutation.broken(ROOT)
        compile(broken, path, "exec")
        assert mutation.names, mutation.name
        for file, _, function in (name.partition("::") for name in mutation.names):
            assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text(), mutation.name


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
    assert not set(EQUIVALENT) - {each.name for each in found}, "these are not broken any more"


SMALL = """
def largest(values):
    found = 0
    for value in values:
        if value > found and not found < 0:
            found = value
        log.info("%d", 1)
    values.clear()
    return found if found else 1
"""


def test_kinds_of_random_breakages(tmp_path: Path) -> None:
    module = tmp_path / "ds_dynmo" / "small.py"
    module.parent.mkdir()
    module.write_text(SMALL)
    every = {
        each.broken(tmp_path)[1]: each.name for seed in range(40) for each in breakages(tmp_path, seed, 1, per_module=9)
    }
    expected = {
        SMALL.replace("found = 0", "found = 1"): "small.py largest: off by one: 0 -> 1 in found = 0",
        SMALL.replace("if value > found and not found < 0", "if (not (value > found and not found < 0))"): (
            "small.py largest: inverted: value > found and not found < 0"
        ),
        SMALL.replace("values.clear()", "pass"): "small.py largest: dropped: values.clear()",
        SMALL.replace("return found if found", "return found if (not (found))"): "small.py largest: inverted: found",
        SMALL.replace("else 1", "else 2"): "small.py largest: off by one: 1 -> 2 in return found if found else 1",
    }
    assert expected.items() <= every.items()
    assert not any("info" not in text for text in every), "what is logged is not broken"
    first = [each.name for each in breakages(tmp_path)]
    module.write_text("import os\n" + SMALL)
    assert [each.name for each in breakages(tmp_path)] == first


def test_what_sets_up_a_fixture_counts_for_every_test_of_its_file() -> None:
    records = [
        {"test": "a.py::one[x (y)] (setup)", "lines": {"m.py": [1]}},
        {"test": "a.py::two (call)", "lines": {"m.py": [2]}},
    ]
    found = joined(Reach(seconds={"a.py::one[x (y)]": 1.0, "a.py::two": 2.0, "b.py::three": 3.0}), records)
    assert found.of("m.py", 1, 1) == ["a.py::one[x (y)]", "a.py::two"] and found.of("m.py", 2, 2) == ["a.py::two"]


def test_a_record_names_the_tests_that_run_a_line_and_lines_that_none_runs_any_more(tmp_path: Path) -> None:
    file = "ds_dynmo/placement.py"
    before = Reach({file: {1: {0, 1}, 2: {1}, 3: {2}}}, ["slow", "quick", "other"], {"slow": 2.0, "quick": 1.0})
    before.save(tmp_path / "record.json")
    assert Reach.load(tmp_path / "record.json") == before
    assert before.of(file, 1, 2) == ["quick", "slow"] and before.of("ds_dynmo/errors.py", 1, 2) == []
    (lost,) = compare(before, Reach({file: {1: {0}, 2: {0}}}, ["slow"], {}))
    assert lost.startswith(f"{file}:3:")
