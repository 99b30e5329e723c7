"""Hosts are removed with what runs there, also if the test that made them is killed."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from guard import guarded_group
from tests.support.namespaces import Network
from tests.support.pages import ROOT

PROGRAM = """
import subprocess, sys
sys.path[:0] = [{root!r}, {root!r} + "/scripts"]
from tests.support.namespaces import network

with network(1) as hosts:
    command = subprocess.Popen(hosts.on(0, ["sleep", "600"]), stdout=subprocess.DEVNULL, start_new_session=True)
    print(hosts.switch, *hosts.hosts, command.pid, flush=True)
    sys.stdin.read(1)
"""


@pytest.mark.parametrize("ends", ["finished", "killed"])
def test_no_host_is_left(ends: str, three_hosts: Network) -> None:
    """``three_hosts``: skips where no host can be made."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(root=str(ROOT))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with guarded_group(program):
        assert program.stdin is not None and program.stdout is not None
        *namespaces, pid = program.stdout.readline().split()
        command = psutil.Process(int(pid))
        assert set(namespaces) <= listed()
        if ends == "killed":
            program.kill()
        else:
            program.stdin.write("x")
            program.stdin.close()
        deadline = time.monotonic() + 60.0
        while set(namespaces) & listed() or (command.is_running() and command.status() != psutil.STATUS_ZOMBIE):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def listed() -> set[str]:
    """Return the names of all network namespaces."""
    lines = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[0] for line in lines}
