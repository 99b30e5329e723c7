"""A real Slurm on this machine: one controller, and a daemon per node, on the loopback interface."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from guard import guarded_group
from tests.support.ports import free_port

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/builtin
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
KillWait=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def skip_without_slurm() -> None:
    """Skip the calling test on a machine where it cannot start a Slurm of its own."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "scontrol") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Slurm (Debian: slurmctld, slurmd, slurm-client): no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs to be root, to start Slurm's daemons")


class Cluster:
    """Nodes with these names, which run until it is closed.

    Attributes:
        environment: variables that make Slurm's commands use this cluster.
        free_port: a port of this machine that a job may use.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._nodes = len(names)
        host = socket.gethostname().partition(".")[0]
        *ports, self.free_port = (free_port() for _ in range(len(names) + 2))
        lines = [
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=1"
            for name, port in zip(names, ports[1:], strict=True)
        ]
        self._spool = tempfile.TemporaryDirectory()  # for sockets, whose paths must be short
        (folder / "state").mkdir()
        for name in names:
            Path(self._spool.name, name).mkdir()
        path = folder / "slurm.conf"
        path.write_text(
            CONFIGURATION.format(host=host, ports=ports, folder=folder, spool=self._spool.name, nodes="\n".join(lines))
        )
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment = {**kept, "SLURM_CONF": str(path)}
        self._guards = ExitStack()  # ends the daemons also if the tests are killed
        self._daemons = [self._daemon("slurmctld", "-D", "-c")]
        self._daemons += [self._daemon("slurmd", "-D", "-N", name) for name in names]
        try:
            self.slurm("srun", f"--nodes={self._nodes}", "true")  # returns when all nodes are up
        except BaseException:
            self.close()
            raise

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        daemon = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._guards.enter_context(guarded_group(daemon))
        return daemon

    def slurm(self, *command: str) -> str:
        """Run one of Slurm's commands, which must succeed, and return what it prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, script: str, nodes: int, folder: Path) -> str:
        """Submit a script as a batch job, wait until it has succeeded, and return its number."""
        path = folder / "batch.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        command = ("sbatch", "--parsable", f"--nodes={nodes}", f"--output={folder}/batch.out", "--wait", str(path))
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, (folder / "batch.out").read_text() + done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm tells about a job."""
        return dict(re.findall(r"(?<!\S)(\w+)=(\S*)", self.slurm("scontrol", "show", "job", "--oneliner", number)))

    def close(self) -> None:
        """End all jobs, then the daemons."""
        with suppress(subprocess.TimeoutExpired):
            for command in (["scancel", "--user=root"], ["srun", f"--nodes={self._nodes}", "true"]):
                # The second command returns when the cancelled jobs have given up their nodes.
                subprocess.run(command, env=self.environment, capture_output=True, timeout=30, check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with suppress(subprocess.TimeoutExpired):  # it is killed next
                daemon.wait(timeout=30)
        self._guards.close()
        self._spool.cleanup()
