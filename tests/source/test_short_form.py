"""The short form on the emulated device: every test that tests/emulated/short_form.txt names exists and is run."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = (ROOT / "tests" / "emulated" / "short_form.txt").read_text().splitlines()
NAMES = [line for line in LISTED if "::" in line]


class Selected:
    """A plugin that keeps the names of the tests that pytest would run."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = {item.nodeid for item in session.items}
        self.names |= {name.partition("[")[0] for name in self.names}  # a list may name all variants of a test


def test_listed_tests_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Every listed name is that of a test that runs: pytest deselects a nightly one without a word.

    With several workers pytest runs no test at all, and reports none, if one name is wrong.
    """
    selected = Selected()
    options = [f"--rootdir={ROOT}", "--collect-only", "-pno:cacheprovider", "-pno:faulthandler"]
    code = pytest.main([*options, *(f"{ROOT}/{name}" for name in NAMES)], plugins=[selected])
    assert code == pytest.ExitCode.OK, capsys.readouterr().err
    assert [name for name in NAMES if name not in selected.names] == [], "not run, as they are nightly"


def test_listed_folders_exist() -> None:
    assert [line for line in LISTED if line not in NAMES and not (ROOT / line).exists()] == []
