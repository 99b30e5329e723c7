"""For all tests: the accelerator, where their temporary folders are, and what may be skipped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from guard import scratch_folder_of_program

NO_PACKAGE = "could not import"  # so begin the reasons of pytest.importorskip
LAUNCHES = {"test_benchmark.py", "test_launch.py", "test_left_behind.py", "test_slurm.py", "test_train_script.py"}


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of tests and of what they start go once pytest has ended, also if it is killed.

    Not those in ``tmp_path``: pytest keeps those of failed tests, and removes them three runs later.
    """
    tmp_path_factory.getbasetemp()
    folder = scratch_folder_of_program()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Run on the CPU, also on a machine with accelerators, unless tests/accelerator alone is asked for.

    DeepSpeed looks for an accelerator once, when it is first asked. Workers, fork servers and launched programs inherit
    the variable.
    """
    folder = Path(__file__).resolve().parent / "accelerator"
    asked = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    if not all(path.resolve().is_relative_to(folder) for path in asked):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that launch programs come first in what each worker begins with, so that short ones are left at the end."""
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
    return _fail_without_package((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _fail_without_package((yield))


def _fail_without_package(report: Any) -> Any:
    """Where ``CI`` is set, a skip for want of a Python package is a failure: the extra "test" installs them all.

    A skip for want of a device, a browser or Slurm stays one, and says so.
    """
    if os.environ.get("CI") and report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if NO_PACKAGE in reason:
            report.outcome, report.longrepr = "failed", f'{reason}: pyproject.toml\'s extra "test" should install it'
    return report
