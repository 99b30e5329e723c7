"""Settings for all tests: their accelerator, their temporary folders, and which skips are allowed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from guard import scratch_folder
from tests import emulated
from tests.mutations import reach
from tests.support import harness

NO_PACKAGE = "could not import"  # beginning of the reasons that pytest.importorskip gives
NO_COMPILER = "needs a C++ compiler"  # in the reason that tests/emulated/build.py gives
NO_DEVICE = pytest.StashKey["str | None"]()  # why the emulated device, if asked for, cannot be made
CPU_SECONDS = pytest.StashKey[float]()  # computed when a test began
LAUNCHES = {
    "test_benchmark_runs.py",
    "test_left_behind.py",
    "test_resumed_training.py",
    "test_slurm.py",
    "test_launchers.py",
    "test_elastic_launch.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", type=int, default=0, metavar="N", help="list the N tests that compute for longest")
    parser.addoption("--seconds-of-tests", metavar="FILE", help="write how long each test took, as JSON")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Note when a test begins what has been computed."""
    item.stash[CPU_SECONDS] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with reach.recorded(f"{item.nodeid} (setup)"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with reach.recorded(f"{item.nodeid} (call)"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Note with the last report of a test for how long it, its ranks and what it launched have computed."""
    yield
    item.user_properties.append(("cpu seconds", round(_cpu_seconds() - item.stash[CPU_SECONDS], 3)))


def _cpu_seconds() -> float:
    times = os.times()
    return sum(times[:4]) + harness.CPU_SECONDS[0]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the tests that compute for longest, and the files: unlike durations, whatever else the machine does."""
    reports = [report for found in terminalreporter.stats.values() for report in found if hasattr(report, "when")]
    if config.option.seconds_of_tests:
        seconds: dict[str, float] = {}
        for report in reports:
            seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        Path(config.option.seconds_of_tests).write_text(json.dumps(seconds))
    if not config.option.cpu:
        return
    costs = {
        report.nodeid: dict(report.user_properties).get("cpu seconds", 0.0)
        for report in reports
        if report.when == "teardown"
    }
    files: dict[str, float] = {}
    for name, seconds in costs.items():
        files[name.partition("::")[0]] = files.get(name.partition("::")[0], 0.0) + seconds
    for title, found in (("files", files), ("tests", costs)):
        terminalreporter.section(f"CPU seconds of {title}: {sum(found.values()):.1f} in all")
        for name in sorted(found, key=lambda name: -found[name])[: config.option.cpu]:
            terminalreporter.write_line(f"{found[name]:8.2f}  {name}")


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove temporary files of tests and of programs that they start when pytest ends, also if it is killed.

    Files in ``tmp_path`` stay: pytest keeps those of failed tests and removes them three runs later.
    """
    tmp_path_factory.getbasetemp()
    folder = scratch_folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Run on the CPU, also on a machine with accelerators, unless only tests/accelerator is asked for.

    ``DS_ACCELERATOR`` may ask for another device. The emulated one is compiled here if need be. DeepSpeed looks for an
    accelerator once. Workers, fork servers and launched programs inherit the variable.

    They also keep what Python compiles, which takes each of them three seconds for our package. And no process of the
    tests interrupts another one: gloo's threads would interrupt the thread that holds the lock they need, and spin.

    Where ``CI`` is set, the summary lists what was skipped, and why: nobody there sees what the machine lacks.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if os.environ.get("CI"):
        config.option.reportchars += "s"
    folder = Path(__file__).resolve().parent / "accelerator"
    asked = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    if not all(path.resolve().is_relative_to(folder) for path in asked):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if emulated.is_asked_for():
        from tests.emulated import build

        config.stash[NO_DEVICE] = build.why_not()
        if config.stash[NO_DEVICE] is None:
            build.library()
            emulated.activate()


class SkippedModule(pytest.Module):
    """A file of tests that cannot be imported, because the device that it is to run on cannot be made."""

    def collect(self) -> Any:
        pytest.skip(str(self.config.stash[NO_DEVICE]), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip every file, with the reason, if the emulated device is asked for and cannot be made."""
    if parent.config.stash.get(NO_DEVICE, None) is None:
        return None
    return SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def emulated_device_found_no_fault() -> Iterator[None]:
    """Fail a test if the emulated device found a fault in pytest's own process."""
    yield
    found = emulated.take_reports()
    assert not found, "\n".join(found)


@pytest.hookimpl(trylast=True)  # pytest has selected by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start each worker with tests that launch programs."""
    _start_with_slow(config, items)


def _start_with_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests that launch programs first in each worker, so that short tests are left for the end."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    slow = [item for item in items if item.path.name in LAUNCHES]
    quick = [item for item in items if item.path.name not in LAUNCHES]
    bounds = [len(quick) * worker // workers for worker in range(workers + 1)]
    items[:] = [
        item
        for worker, (first, last) in enumerate(zip(bounds, bounds[1:]))
        for item in [*slow[worker::workers], *quick[first:last]]
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _fail_if_incomplete((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _fail_if_incomplete((yield))


def _fail_if_incomplete(report: Any) -> Any:
    """Where ``CI`` is set, fail a test that was skipped for want of a Python package or of a compiler.

    The extra "test" installs all packages. Skips because of a missing device or Slurm stay skips.
    """
    if os.environ.get("CI") and report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if NO_PACKAGE in reason:
            report.outcome, report.longrepr = "failed", f'{reason}: pyproject.toml\'s extra "test" should install it'
        elif NO_COMPILER in reason:
            report.outcome, report.longrepr = "failed", reason
    return report
