"""What tests/conftest.py does for all tests: what CI may skip, which accelerator they run on, what they take."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IN_A_TEST = "import pytest\ndef test():\n    pytest.{}\n"
IN_A_MODULE = "import pytest\npytest.{}\ndef test(): pass\n"
WANTS_PACKAGE = "importorskip('no_such_package')"


@pytest.mark.parametrize(
    ("text", "ci", "code", "said"),
    [
        (IN_A_TEST.format(WANTS_PACKAGE), "true", 1, "could not import 'no_such_package'"),
        (IN_A_MODULE.format(WANTS_PACKAGE), "true", 2, "could not import 'no_such_package'"),
        (IN_A_TEST.format(WANTS_PACKAGE), "", 0, "could not import 'no_such_package'"),
        (IN_A_TEST.format("skip('needs an accelerator')"), "true", 0, "needs an accelerator"),
    ],
)
def test_a_skip_for_want_of_a_package_fails_in_ci(text: str, ci: str, code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(text)
    done = run_tests(tmp_path, ".", CI=ci)
    assert done.returncode == code and said in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("ci", "listed"), [("true", True), ("", False)])
def test_the_reasons_of_skips_are_listed_in_ci(ci: str, listed: bool, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(IN_A_TEST.format("skip('needs Chromium')"))
    done = run_tests(tmp_path, "-rfE", CI=ci)  # pytest's default
    assert done.returncode == 0 and ("needs Chromium" in done.stdout) is listed, done.stdout


@pytest.mark.parametrize(
    ("asked", "accelerator"),
    [(["accelerator/test_one.py::test"], ""), (["accelerator"], ""), (["."], "cpu"), (["accelerator", "pure"], "cpu")],
)
def test_only_the_tests_of_accelerators_see_one(asked: list[str], accelerator: str, tmp_path: Path) -> None:
    for folder in ("accelerator", "pure"):
        (tmp_path / folder).mkdir()
        seen = f"import os\ndef test():\n    assert os.environ.get('DS_ACCELERATOR', '') == '{accelerator}'\n"
        (tmp_path / folder / "test_one.py").write_text(seen)
    done = run_tests(tmp_path, *asked)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("ci", "code"), [pytest.param("", 5, marks=pytest.mark.nightly), ("true", 2)])
def test_without_a_compiler_no_test_of_the_emulated_device_runs(ci: str, code: int, tmp_path: Path) -> None:
    """They are skipped with the reason; in CI that is an error."""
    (tmp_path / "test_one.py").write_text("import no_such_module\n")
    (tmp_path / "nothing_compiled.py").write_text(f"import sys\nsys.prefix = {str(tmp_path)!r}\n")
    variables = {"CXX": "no-such-compiler", "DS_ACCELERATOR": "emulated", "CI": ci}
    done = run_tests(tmp_path, "-p", "nothing_compiled", ".", **variables)
    assert done.returncode == code and "needs a C++ compiler" in done.stdout, done.stdout + done.stderr


def test_what_tests_compute_and_how_long_they_take_is_told(tmp_path: Path) -> None:
    text = "import pytest\ndef test_long():\n    sum(range(9_000_000))\ndef test_short():\n    pass\n"
    (tmp_path / "test_one.py").write_text(text)
    done = run_tests(tmp_path, "--cpu", "1", f"--seconds-of-tests={tmp_path / 'seconds.json'}", ".")
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"^ +[\d.]+  (\S+)$", done.stdout, re.MULTILINE)
    assert told == ["test_one.py", "test_one.py::test_long"]
    seconds = json.loads((tmp_path / "seconds.json").read_text())
    assert list(seconds) == ["test_one.py::test_long", "test_one.py::test_short"] and seconds[told[1]] > 0


def run_tests(folder: Path, *asked: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in ``folder`` with our tests/conftest.py."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", *("-p", "no:cacheprovider"), *("-p", "no:xdist"), *asked],
        cwd=folder,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]), **variables},
        capture_output=True,
        text=True,
    )
