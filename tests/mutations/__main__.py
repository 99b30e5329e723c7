"""Break the code in small ways, one at a time, and see that a test fails: ``python -m tests.mutations [WORDS]``.

Each breakage is applied to a copy of the checkout, and the tests that should catch it run there; they have to pass
without it. WORDS choose breakages by what their names contain. Fails, naming them, if one was not caught, or does not
apply any more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.device import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ["ds_dynmo", "ds_configs", "docs", "scripts", "tests", "pyproject.toml", "setup.py", "README.md"]
SECONDS = 600.0
TESTS_FAILED = 1  # pytest's exit status; others mean that no test ran


def pytest_in(folder: Path, tests: str, accelerator: str) -> tuple[int, str]:
    """Run tests in a copy of the checkout, and return pytest's exit status and last line."""
    command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-p", "no:cacheprovider", *tests.split()]
    settings = {"DS_ACCELERATOR": accelerator, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, timeout=SECONDS
    )
    return done.returncode, (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""])[-1]


def run(mutation: Mutation, folder: Path, green: set[str]) -> str | None:
    """Apply a mutation to the copy in ``folder``, run its tests, and undo it.

    Args:
        green: tests that are known to pass unbroken; grows.

    Returns:
        What went wrong: it cannot be applied, its tests fail without it, or no test failed.
    """
    path = folder / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return f"its text occurs {text.count(mutation.old)} times in {mutation.file}, not once"
    try:
        if mutation.tests not in green:
            status, last = pytest_in(folder, mutation.tests, mutation.accelerator)
            if status:
                return f"{mutation.tests} fails unbroken: {last}"
            green.add(mutation.tests)
        path.write_text(text.replace(mutation.old, mutation.new))
        status, last = pytest_in(folder, mutation.tests, mutation.accelerator)
    except subprocess.TimeoutExpired:
        return f"its tests were not done in {SECONDS:g} s"
    finally:
        path.write_text(text)
    return None if status == TESTS_FAILED else f"not caught by {mutation.tests}: {last}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of the names of breakages to try; all without any")
    words = parser.parse_args(arguments).words
    chosen = [one for one in MUTATIONS if not words or any(word in one.name for word in words)]
    failures: list[str] = []
    green: set[str] = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / part, folder / part)
        for number, mutation in enumerate(chosen, start=1):
            started = time.monotonic()
            problem = run(mutation, folder, green)
            print(
                f"{number}/{len(chosen)} {mutation.name}: {problem or 'caught'} ({time.monotonic() - started:.0f} s)",
                flush=True,
            )
            failures += [mutation.name] if problem else []
    print(f"{len(chosen) - len(failures)} of {len(chosen)} caught" + "".join(f"\n  not: {name}" for name in failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
