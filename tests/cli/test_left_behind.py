"""None of our commands, finished, failed or killed, leaves processes, shared memory, locks or folders behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.watched_command import ROOT, TORCHS_CACHE, WatchedCommand

pytestmark = pytest.mark.ranks

QUICKSTART = ["bash", str(ROOT / "scripts" / "quickstart.sh")]
NODE_LAUNCHER = "deepspeed.launcher.launch"


@pytest.mark.nightly
def test_a_finished_run_leaves_nothing(tmp_path: Path) -> None:
    """A lock was left in torch's extensions before."""
    with WatchedCommand(tmp_path, [*QUICKSTART, "--steps", "2"]) as command:
        assert not command.left(), command.output()
        assert command.launcher.returncode == 0 and "step 2/2" in command.output(), command.output()
        assert "setup_env: installing" not in command.output(), "what is installed gets installed again"


@pytest.mark.nightly
def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    with WatchedCommand(tmp_path, [*QUICKSTART, "--data", str(tmp_path / "nowhere")]) as command:
        assert not command.left(), command.output()
        assert command.launcher.returncode > 0 and "nowhere" in command.output(), command.output()


@pytest.mark.parametrize(
    "killed",
    [
        "rank",
        *(pytest.param(killed, marks=pytest.mark.nightly) for killed in ("launcher", "launcher of the ranks", "group")),
    ],
)
def test_a_killed_run_leaves_nothing(killed: str, tmp_path: Path) -> None:
    """It is killed in the middle of training."""
    report = tmp_path / "report.jsonl"
    with WatchedCommand(tmp_path, [*QUICKSTART, "--report", str(report)]) as command:
        command.until(lambda: report.exists() and '"kind": "step"' in report.read_text())
        assert len(command.processes("--local_rank=")) == 2
        if killed == "group":
            os.killpg(command.launcher.pid, signal.SIGKILL)
        elif killed == "launcher":
            command.launcher.kill()
        else:
            (victim,) = command.processes("--local_rank=1" if killed == "rank" else NODE_LAUNCHER)
            victim.kill()
        assert not command.left(), command.output()


@pytest.mark.nightly
def test_a_run_stopped_by_ctrl_c_saves_and_leaves_nothing(tmp_path: Path) -> None:
    """The launcher dies of it at once, and its launcher on the node sends SIGTERM to the ranks."""
    report, saved = tmp_path / "report.jsonl", tmp_path / "saved"
    with WatchedCommand(tmp_path, [*QUICKSTART, "--report", str(report), "--save", str(saved)]) as command:
        command.until(lambda: report.exists() and '"kind": "step"' in report.read_text())
        os.killpg(command.launcher.pid, signal.SIGINT)
        assert not command.left(), command.output()
        assert f"stopped by SIGINT; the same command with --resume {saved} continues" in command.output()
        assert (saved / (saved / "latest").read_text()).is_dir()


@pytest.mark.nightly
def test_a_run_killed_before_its_ranks_start_leaves_nothing(tmp_path: Path) -> None:
    """Ranks that its child processes still start find that the launcher has died."""
    with WatchedCommand(tmp_path, QUICKSTART) as command:
        node_launchers: list[psutil.Process] = command.until(lambda: command.processes(NODE_LAUNCHER))
        assert len(node_launchers) == 1 and not command.processes("--local_rank=")
        command.launcher.kill()
        assert not command.left(), command.output()


@pytest.mark.nightly
@pytest.mark.parametrize("killed", ["launcher", "group"])
def test_a_killed_script_that_launches_jobs_leaves_nothing(killed: str, tmp_path: Path) -> None:
    """Its jobs are in process groups of their own."""
    variables = ["env", "DS_ACCELERATOR=cpu", "LOCAL_SIZE=2", f"PYTHONPATH={ROOT}"]
    script = [sys.executable, str(ROOT / "scripts" / "try_accelerators.py"), str(tmp_path / "out")]
    with WatchedCommand(tmp_path, [*variables, *script, "--quick", "--only", "overhead"]) as command:
        command.until(lambda: command.processes("--local_rank=1"))
        if killed == "group":
            os.killpg(command.launcher.pid, signal.SIGKILL)
        else:
            command.launcher.kill()
        assert not command.left(TORCHS_CACHE), command.output()


@pytest.mark.nightly
def test_killed_tests_leave_nothing(tmp_path: Path) -> None:
    """Only pytest's own folders stay."""
    tests = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/engine/test_bitwise.py"]
    with WatchedCommand(tmp_path, tests) as command:
        command.until(lambda: len(command.processes("multiprocessing.forkserver")) > 2)
        command.launcher.kill()
        assert not command.left("/pytest-of-"), command.output()
