"""When a program ends or is killed, the processes it started and its scratch folder are gone, too."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import subprocess, sys
from guard import guarded_group, scratch_folder

folder = scratch_folder()
(folder / "file").touch()
sleeper = ["sh", "-c", "sleep 600 & wait"]  # a leader whose child is in its group
leader = subprocess.Popen(sleeper, stdout=subprocess.DEVNULL, text=True, start_new_session=True)
with guarded_group(leader):
    print(folder, leader.pid, flush=True)
    sys.stdin.read(1)
    if sys.argv[1] == "failed":
        raise RuntimeError
"""


@pytest.mark.parametrize("ends", ["finished", "failed", "killed"])
def test_no_process_and_no_folder_is_left(ends: str) -> None:
    command = [sys.executable, "-c", PROGRAM, ends]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=ROOT / "scripts", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet, text=True
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        folder, _, leader = program.stdout.readline().rpartition(" ")
        group = [psutil.Process(int(leader)), *psutil.Process(int(leader)).children()]
        assert Path(folder, "file").exists()
        if ends == "killed":
            program.kill()
        else:
            program.stdin.write("x")
    assert program.returncode == {"finished": 0, "failed": 1, "killed": -signal.SIGKILL}[ends]
    deadline = time.monotonic() + 60.0
    while Path(folder).exists() or any(map(is_alive, group)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
