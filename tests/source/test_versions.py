"""The versions of other packages that were tested: one table, for the package, its metadata, scripts and docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from ds_dynmo.engine.versions import TESTED, newer_than_tested

ROOT = Path(__file__).parents[2]
OTHERS = [name for name in TESTED if name != "torch"]


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [("2.13.0+cpu", False), ("2.15.0+cu132", False), ("2.15.1", True), ("3.0", True)],
)
def test_a_version_newer_than_tested_is_named(version: str, is_newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTHERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch, "__version__", version)
    line = f"newer than what ds_dynmo was tested with: torch {version} (tested: {', '.join(TESTED['torch'])})"
    assert newer_than_tested() == (line if is_newer else None)


@pytest.mark.parametrize("name", TESTED)
def test_the_package_metadata_has_the_oldest_tested_versions(name: str) -> None:
    bounds = re.findall(rf'"({name}>=[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert bounds
    for bound in bounds:
        (lowest,) = (part for part in Requirement(bound).specifier if part.operator == ">=")
        assert Version(lowest.version) == Version(TESTED[name][0])
        assert all(Requirement(bound).specifier.contains(version) for version in TESTED[name])


def test_the_page_of_limits_has_the_tested_versions() -> None:
    page = (ROOT / "docs" / "limits.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| [^|]* \| ([^|]*) \|$", page, re.MULTILINE))
    assert {name: rows[name] for name in TESTED} == {name: ", ".join(versions) for name, versions in TESTED.items()}


def test_the_scripts_install_a_tested_torch() -> None:
    (version,) = re.findall(r"torch==([\d.]+)", (ROOT / "scripts" / "setup_env.sh").read_text())
    assert version in TESTED["torch"]


def test_every_text_names_the_oldest_python() -> None:
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    texts = {
        "pyproject.toml": f'target-version = "py{oldest.replace(".", "")}"',
        "README.md": f"Python {oldest} or newer",
        "CONTRIBUTING.md": f"Python {oldest} or newer",
        "docs/scripts.md": f"Python {oldest} or newer",
        "docs/limits.md": f"| Python | {oldest} or newer |",
        "scripts/setup_env.sh": f"sys.version_info < ({oldest.replace('.', ', ')})",
    }
    assert [path for path, text in texts.items() if text not in (ROOT / path).read_text()] == []
