"""Which lines of the package each test runs, in pytest's process and on its ranks.

``python -m tests.mutations.reach FILE [ARGUMENTS OF PYTEST]`` runs tests and records it in FILE;
``python -m tests.mutations.reach --compare BEFORE AFTER`` prints the lines that only the first record has.

What a launched program runs is not recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "DS_DYNMO_REACH"  # the variable that names the folder to record in


@contextmanager
def recorded(test: str) -> Iterator[None]:
    """Record what this process runs of the package for a test, if recording was asked for."""
    folder = os.environ.get(FOLDER)
    if not folder:
        yield
        return
    from coverage import Coverage

    root = Path.cwd() if (Path.cwd() / "ds_dynmo").is_dir() else ROOT
    coverage = Coverage(data_file=None, source=[str(root / "ds_dynmo")], config_file=False, messages=False)
    coverage.start()
    try:
        yield
    finally:
        coverage.stop()
        with warnings.catch_warnings(action="ignore"):  # that nothing of the package ran
            data = coverage.get_data()
        lines = {str(Path(file).relative_to(root)): data.lines(file) for file in data.measured_files()}
        with open(Path(folder) / f"{os.getpid()}.jsonl", "a") as written:
            written.write(
                json.dumps({"test": test, "lines": {file: each for file, each in lines.items() if each}}) + "\n"
            )


@dataclass
class Reach:
    """Which tests run which lines.

    Attributes:
        lines: by file and line, the tests' numbers.
        tests: their names, by number.
        seconds: that each took.
    """

    lines: dict[str, dict[int, set[int]]] = field(default_factory=dict)
    tests: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, file: str, first: int, last: int) -> list[str]:
        """Return the tests that run any of the lines from ``first`` to ``last``, those that take least first."""
        numbers: set[int] = set()
        for line, tests in self.lines.get(file, {}).items():
            if first <= line <= last:
                numbers |= tests
        return sorted((self.tests[number] for number in numbers), key=lambda test: (self.seconds.get(test, 0.0), test))

    def save(self, path: Path) -> None:
        """Write the record as JSON."""
        lines = {
            file: {str(line): sorted(tests) for line, tests in sorted(found.items())}
            for file, found in sorted(self.lines.items())
        }
        path.write_text(json.dumps({"tests": self.tests, "seconds": self.seconds, "lines": lines}))

    @classmethod
    def load(cls, path: Path) -> Reach:
        """Read a record."""
        read: dict[str, Any] = json.loads(path.read_text())
        lines = {
            file: {int(line): set(tests) for line, tests in found.items()} for file, found in read["lines"].items()
        }
        return cls(lines, read["tests"], read["seconds"])


def record(arguments: Sequence[str], folder: Path = ROOT) -> Reach:
    """Run pytest in a checkout, and return what its tests ran. Tests that fail are recorded, too."""
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, FOLDER: name, "PYTHONPATH": str(folder)}
        report = Path(name) / "report.json"
        command = [sys.executable, "-m", "pytest", f"--seconds-of-tests={report}", *arguments]
        subprocess.run(command, cwd=folder, env=environment, check=False)
        reach = Reach(seconds=json.loads(report.read_text()) if report.exists() else {})
        records = [json.loads(line) for path in Path(name).glob("*.jsonl") for line in path.read_text().splitlines()]
    return joined(reach, records)


def joined(reach: Reach, records: Sequence[dict[str, Any]]) -> Reach:
    """Fill in the records of the tests that were run, not of those that they run themselves.

    What sets up a fixture counts for every test of the file: they may share it.
    """
    in_file: dict[str, set[str]] = {}
    for test in reach.seconds:
        in_file.setdefault(test.partition("::")[0], set()).add(test)
    reach.tests = sorted(test for tests in in_file.values() for test in tests)
    number = {test: index for index, test in enumerate(reach.tests)}
    for each in records:
        test, phase = _test_and_phase(each["test"])
        if test not in number:
            continue
        users = in_file[test.partition("::")[0]] if phase == "setup" else {test}
        numbers = {number[user] for user in users}
        for file, lines in each["lines"].items():
            found = reach.lines.setdefault(file, {})
            for line in lines:
                found.setdefault(line, set()).update(numbers)
    return reach


def _test_and_phase(recorded: str) -> tuple[str, str]:
    """Split what pytest says it runs, such as "file::test (call)"; a test's name may hold parentheses, too."""
    test, _, phase = recorded.rpartition(" (")
    return test, phase.removesuffix(")")


def compare(before: Reach, after: Reach) -> list[str]:
    """Return the lines that tests ran before and do not run any more, with their text."""
    lost = []
    for file, lines in sorted(before.lines.items()):
        gone = sorted(set(lines) - set(after.lines.get(file, {})))
        text = (ROOT / file).read_text().splitlines() if gone and (ROOT / file).exists() else []
        lost += [f"{file}:{line}: {text[line - 1].strip()}" for line in gone if line <= len(text)]
    return lost


def main(arguments: Sequence[str]) -> int:
    """Record, or compare two records."""
    if len(arguments) == 3 and arguments[0] == "--compare":
        lost = compare(*(Reach.load(Path(path)) for path in arguments[1:]))
        print("\n".join([*lost, f"{len(lost)} lines are not run any more"]))
        return int(bool(lost))
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    record(arguments[1:]).save(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
