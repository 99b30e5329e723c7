"""What may be skipped in CI: what needs a device or a program, not what needs a Python package."""

from __future__ import annotations

import os
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
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code and said in done.stdout, done.stdout + done.stderr
