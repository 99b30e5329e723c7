"""Break the code in small ways, one at a time, and see that a test fails: ``python -m tests.mutations [WORDS]``.

Each breakage is applied to a copy of the checkout, and the tests that should catch it run there; they have to pass
without it. WORDS choose breakages by their topic or by what their names contain. Fails, naming them, if one was not
caught, or does not apply any more.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch._dynamo  # forks have it: it takes seconds to import  # noqa: F401

from tests.mutations import TOPICS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600.0
TESTS_FAILED = 1  # pytest's exit status; others mean that no test ran


class RanksFork(multiprocessing.context.ForkContext):
    """Ranks start as forks of pytest, which has imported what they need, instead of a server that would import it."""

    def set_forkserver_preload(self, module_names: list[str]) -> None:
        for name in module_names:
            importlib.import_module(name)


def _pytest(folder: Path, mutation: Mutation, output: int) -> None:
    """Run pytest in this process, a fork of one that has imported torch, as if it had been started in ``folder``."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.update(
        DS_ACCELERATOR=mutation.accelerator, PYTHONPATH=str(folder), CUDA_VISIBLE_DEVICES="", COLUMNS="400"
    )
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    sys.dont_write_bytecode = False  # the copy is compiled once
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    if mutation.accelerator == "cpu":
        multiprocessing.context._concrete_contexts["forkserver"] = RanksFork()
    chosen = shlex.split(mutation.tests)
    marks = ["-m", "not compiled"] if "-k" in chosen else []  # who chooses variants chooses among nightly ones too
    sys.exit(pytest.main(["-x", "--tb=short", "-p", "no:cacheprovider", *marks, *chosen]))


def pytest_in(folder: Path, mutation: Mutation) -> tuple[int | None, str]:
    """Run a mutation's tests in a copy of the checkout.

    Returns:
        pytest's exit status, None if it took too long, and the failure, or its last line.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=(folder, mutation, output.fileno()))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            return None, f"it was not done in {SECONDS:g} s"
        output.seek(0)
        lines = output.read().strip().splitlines() or [""]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    of_rank = [
        line[1:].strip() for line in lines if line.startswith("E ") and "Error: " in line and "RankError" not in line
    ]
    return process.exitcode, " ".join([*failures[:1], *of_rank[-1:]]) or lines[-1]


def run(mutation: Mutation, folder: Path, green: set[tuple[str, str]]) -> tuple[bool, str]:
    """Apply a mutation to the copy in ``folder``, run its tests, and undo it.

    Args:
        green: tests that are known to pass unbroken, with their accelerator; grows.

    Returns:
        Whether a test caught it, and the failure; or why not: it cannot be applied, its tests fail without it, or none
        failed.
    """
    try:
        path, broken = mutation.broken(folder)
    except LookupError as error:
        return False, str(error)
    if (mutation.tests, mutation.accelerator) not in green:
        status, line = pytest_in(folder, mutation)
        if status != 0:
            return False, f"{mutation.tests} fails unbroken: {line}"
        green.add((mutation.tests, mutation.accelerator))
    text = path.read_text()
    path.write_text(broken)
    status, line = pytest_in(folder, mutation)
    path.write_text(text)
    return status == TESTS_FAILED, line if status == TESTS_FAILED else f"not caught by {mutation.tests}: {line}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help=f"topics ({', '.join(TOPICS)}), or parts of names; all without any")
    parser.add_argument("--list", action="store_true", help="print the names and their tests, and run nothing")
    options = parser.parse_args(arguments)
    chosen = [
        (topic, mutation)
        for topic, mutations in TOPICS.items()
        for mutation in mutations
        if not options.words
        or any(topic == word if word in TOPICS else word in mutation.name for word in options.words)
    ]
    if options.list:
        print("\n".join(f"{topic}: {mutation.name}: {mutation.tests}" for topic, mutation in chosen))
        return 0
    failures: list[str] = []
    green: set[tuple[str, str]] = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / ROOT.name
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for number, (topic, mutation) in enumerate(chosen, start=1):
            started = time.monotonic()
            caught, line = run(mutation, folder, green)
            seconds = f"({time.monotonic() - started:.0f} s)"
            print(f"{number}/{len(chosen)} {topic}: {mutation.name}: {'caught' if caught else 'NOT CAUGHT'} {seconds}")
            print(f"    {line[:300]}", flush=True)
            failures += [] if caught else [mutation.name]
    print(f"{len(chosen) - len(failures)} of {len(chosen)} caught" + "".join(f"\n  not: {name}" for name in failures))
    return int(bool(failures) or not chosen)


if __name__ == "__main__":
    sys.exit(main())
