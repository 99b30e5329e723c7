"""scripts/try_accelerators.py runs a step through DeepSpeed's launcher, and writes its JSON and its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_a_step_is_launched_judged_and_written(tmp_path: Path) -> None:
    """Two ranks share the CPU, which counts no allocations and whose seconds say nothing."""
    flags = [str(tmp_path / "out"), "--quick", "--only", "overhead"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "try_accelerators.py"), *flags],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    (step,) = results["steps"]
    assert [held for _, _, held, _ in step["expectations"]] == [True, None, None]
    assert "MiB per move" in step["commands"][0]["figures"]
    assert results["machine"]["accelerator"] == "cpu" and results["machine"]["environment"]["os"]
    text = (tmp_path / "out" / "page.md").read_text()
    assert "**1 of 1 expectation held, 2 not judged, 0 steps skipped**" in text and "batch ms" in text
    assert "[1/1] overhead" in done.stdout and done.stdout.splitlines()[-1].startswith("1 of 1 expectation held")
