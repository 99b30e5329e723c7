"""Break the code in small ways, one at a time, and see that a quick test fails: ``python -m tests.mutations [WORDS]``.

Each breakage is applied to a copy of the checkout. The quick tests that run the broken lines run there, those that a
breakage names first, then those of the same folder, then the others, until one fails. Which tests run which lines is
recorded first, in one run of the quick set, or read from a file (--reach). WORDS choose breakages by their topic or by
what their names contain; the topic "random" has those of random lines. Prints a table at the end, and fails, naming
them, if a breakage of a promise was not caught or does not apply any more, or more than 5% of the others.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed looks for one

import deepspeed  # forks have it, as all below: it takes seconds to import  # noqa: F401
import pydantic  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401

from tests.mutations import TOPICS, reach
from tests.mutations.choice import chosen_tests
from tests.mutations.equivalent import EQUIVALENT
from tests.mutations.mutation import Mutation
from tests.mutations.random_lines import Breakage, breakages
from tests.mutations.reach import Reach

ROOT = Path(__file__).resolve().parents[2]
RANDOM = "random"
SECONDS = 600.0  # after which a breakage makes the tests hang, which no run passes
TESTS_FAILED, INTERRUPTED, USAGE = 1, 2, 4  # pytest's exit statuses; the others: a file of tests cannot be imported
SHARE = 0.95  # of the random ones that are to be caught


class RanksFork(multiprocessing.context.ForkContext):
    """Ranks start as forks of pytest, which has imported what they need, instead of a server that would import it."""

    def set_forkserver_preload(self, module_names: list[str]) -> None:
        for name in module_names:
            importlib.import_module(name)


def _pytest(folder: Path, tests: Sequence[str], output: int) -> None:
    """Run pytest in this process, a fork of one that has imported torch, as if it had been started in ``folder``."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.update(_environment(folder))
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    sys.dont_write_bytecode = False  # the copy is compiled once
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    multiprocessing.context._concrete_contexts["forkserver"] = RanksFork()
    sys.exit(pytest.main([*OPTIONS, *tests]))


OPTIONS = ["-x", "--tb=short", "-p", "no:cacheprovider", "-m", "not nightly and not compiled"]


def _environment(folder: Path, accelerator: str = "cpu") -> dict[str, str]:
    return {
        "DS_ACCELERATOR": accelerator,
        "PYTHONPATH": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "400",
        "OMP_NUM_THREADS": "1",
        "DS_DYNMO_RANK_SECONDS": "60",
    }


def pytest_in(folder: Path, tests: Sequence[str], accelerator: str) -> tuple[int | None, str]:
    """Run tests in a copy of the checkout, until one fails.

    Returns:
        pytest's exit status, None if it took too long, and the failure, or its last line.
    """
    with tempfile.TemporaryFile("w+") as output:
        if accelerator == "cpu":
            process = multiprocessing.get_context("fork").Process(target=_pytest, args=(folder, tests, output.fileno()))
            process.start()
            process.join(SECONDS)
            status = process.exitcode
            process.kill()
            process.join()
        else:
            command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
            environment = {**os.environ, **_environment(folder, accelerator)}
            try:
                status = subprocess.run(
                    command, cwd=folder, env=environment, stdout=output, stderr=output, timeout=SECONDS
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
        output.seek(0)
        lines = output.read().strip().splitlines() or [""]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    of_rank = [
        line[1:].strip() for line in lines if line.startswith("E ") and "Error: " in line and "RankError" not in line
    ]
    return status, " ".join([*failures[:1], *of_rank[-1:]]) or lines[-1]


@dataclass(frozen=True)
class Outcome:
    """What became of a breakage.

    Attributes:
        kind: "caught", "MISSED", "equivalent", "DOES NOT APPLY", or "NOT RUN": pytest did not find the tests.
        line: the failure, or why there was none.
    """

    topic: str
    name: str
    kind: str
    line: str
    seconds: float


def run(topic: str, breakage: Mutation | Breakage, folder: Path, known: Reach, budget: float) -> Outcome:
    """Apply a breakage to the copy in ``folder``, run tests, and undo it."""
    started = time.monotonic()

    def outcome(kind: str, line: str) -> Outcome:
        return Outcome(topic, breakage.name, kind, line, time.monotonic() - started)

    if (reason := EQUIVALENT.get(breakage.name)) is not None:
        return outcome("equivalent", reason)
    try:
        path, broken = breakage.broken(folder)
        first, last = (breakage.first, breakage.last) if isinstance(breakage, Breakage) else breakage.lines(folder)
    except LookupError as error:
        return outcome("DOES NOT APPLY", str(error))
    accelerator = breakage.accelerator if isinstance(breakage, Mutation) else "cpu"
    if accelerator == "cpu":
        tests = chosen_tests(breakage, str(path.relative_to(folder)), first, last, known, budget)
    else:
        tests = breakage.names
    if not tests:
        return outcome("MISSED", "no quick test runs it")
    text = path.read_text()
    path.write_text(broken)
    try:
        status, line = pytest_in(folder, tests, accelerator)
    finally:
        path.write_text(text)
    if status is None:
        return outcome("caught", f"not done in {SECONDS:g} s")
    if status in (TESTS_FAILED, INTERRUPTED) or (status == USAGE and line.startswith("ERROR tests/")):
        return outcome("caught", line)
    return outcome("MISSED" if status == 0 else "NOT RUN", f"{len(tests)} tests: {line}")


def _worker(tasks: Any, outcomes: Any, known: Reach, budget: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = _copy(Path(name))
        while (task := tasks.get()) is not None:
            outcomes.put(run(*task, folder, known, budget))


def _copy(parent: Path) -> Path:
    folder = parent / ROOT.name
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "nightly"))
    return folder


def outcomes_of(chosen: Sequence[tuple[str, Any]], known: Reach, jobs: int, budget: float) -> Iterator[Outcome]:
    """Run breakages in several processes, each with a copy of the checkout."""
    context = multiprocessing.get_context("fork")
    tasks, outcomes = context.Queue(), context.Queue()
    for each in [*chosen, *[None] * jobs]:
        tasks.put(each)
    workers = [context.Process(target=_worker, args=(tasks, outcomes, known, budget)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        for _ in chosen:
            yield outcomes.get()
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def table(outcomes: Sequence[Outcome]) -> str:
    """Return how many breakages of each topic were caught and missed, and what the tests took."""
    lines = [f"{'topic':<12} {'breakages':>9} {'caught':>7} {'missed':>7} {'equivalent':>10} {'seconds':>8}"]
    topics = list(dict.fromkeys(outcome.topic for outcome in outcomes))
    for topic in [*topics, "all"]:
        of_topic = [outcome for outcome in outcomes if topic in (outcome.topic, "all")]
        kinds = [outcome.kind for outcome in of_topic]
        caught, equivalent = kinds.count("caught"), kinds.count("equivalent")
        missed, seconds = len(kinds) - caught - equivalent, sum(outcome.seconds for outcome in of_topic)
        lines.append(f"{topic:<12} {len(kinds):>9} {caught:>7} {missed:>7} {equivalent:>10} {seconds:>8.0f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    topics = [*TOPICS, RANDOM]
    parser.add_argument("words", nargs="*", help=f"topics ({', '.join(topics)}), or parts of names; all without any")
    parser.add_argument("--list", action="store_true", help="print the names and their tests, and run nothing")
    parser.add_argument("--reach", type=Path, help="a file of python -m tests.mutations.reach, instead of a run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="breakages at a time")
    parser.add_argument(
        "--seconds",
        type=float,
        default=100.0,
        help="of tests per breakage, at most; more for those missed (%(default)g)",
    )
    options = parser.parse_args(arguments)
    every: list[tuple[str, Mutation | Breakage]] = [(topic, each) for topic, of in TOPICS.items() for each in of]
    every += [(RANDOM, each) for each in breakages(ROOT)]
    chosen = [
        (topic, each)
        for topic, each in every
        if not options.words or any(topic == word if word in topics else word in each.name for word in options.words)
    ]
    if options.list:
        print("\n".join(f"{topic}: {each.name}: {getattr(each, 'tests', '')}" for topic, each in chosen))
        return 0
    known = Reach.load(options.reach) if options.reach else _recorded([each for _, each in chosen])
    outcomes: list[Outcome] = []
    for outcome in outcomes_of(chosen, known, options.jobs, options.seconds):
        outcomes.append(outcome)
        print(
            f"{len(outcomes)}/{len(chosen)} {outcome.topic}: {outcome.name}: {outcome.kind} ({outcome.seconds:.0f} s)"
        )
        print(f"    {outcome.line[:300]}", flush=True)
    missed = [outcome for outcome in outcomes if outcome.kind not in ("caught", "equivalent")]
    print(table(outcomes), *(f"not caught: {outcome.topic}: {outcome.name}" for outcome in missed), sep="\n")
    of_lines = [outcome for outcome in missed if outcome.topic == RANDOM]
    tried = sum(outcome.topic == RANDOM and outcome.kind != "equivalent" for outcome in outcomes)
    return int(not chosen or len(missed) > len(of_lines) or len(of_lines) > (1 - SHARE) * tried)


def _recorded(chosen: Sequence[Mutation | Breakage]) -> Reach:
    """Record which quick tests run which lines: of the tests that are named, if only a few breakages are tried."""
    named = {name for each in chosen if isinstance(each, Mutation) for name in each.names}
    few = len(chosen) <= 5 and all(isinstance(each, Mutation) for each in chosen)
    with tempfile.TemporaryDirectory() as name:
        return reach.record(["-n", "3", "--dist", "worksteal", *(sorted(named) if few else [])], _copy(Path(name)))


if __name__ == "__main__":
    sys.exit(main())
