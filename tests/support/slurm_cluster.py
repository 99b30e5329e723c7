"""A real Slurm: one controller, and a daemon per node, on the loopback interface or on hosts of a test."""

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
from tests.support.namespaces import Network
from tests.support.ports import free_port

CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}
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
# slurmd asks for these; `ip netns exec` hides them, as it mounts another /sys.
MOUNT_CGROUPS = " && ".join(
    (
        "mount -t tmpfs none /sys/fs/cgroup",
        "mkdir /sys/fs/cgroup/systemd",
        "mount -t cgroup -o none,name=systemd none /sys/fs/cgroup/systemd",
    )
)


def skip_without_slurm() -> None:
    """Skip the calling test on a machine where it cannot start a Slurm of its own."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "scontrol") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Slurm (Debian: slurmctld, slurmd, slurm-client): no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs to be root, to start Slurm's daemons")


class Cluster:
    """Nodes with these names, which run until it is closed.

    Args:
        hosts: where the nodes are, one on each; the controller is on the first. None: all on this machine.

    Attributes:
        environment: variables that make Slurm's commands use this cluster.
        free_port: a port of this machine that a job may use.
    """

    def __init__(self, folder: Path, names: Sequence[str], hosts: Network | None = None) -> None:
        self._nodes, self._hosts = len(names), hosts
        *ports, self.free_port = (free_port() for _ in range(len(names) + 2))
        if hosts is None:
            here = socket.gethostname().partition(".")[0]
            controller = f"{here}(127.0.0.1)"
            where = [f"NodeAddr=127.0.0.1 NodeHostname={here}"] * len(names)
        else:
            controller = f"{names[0]}({hosts.address(0)})"
            where = [f"NodeAddr={hosts.address(number)}" for number in range(len(names))]
        lines = [
            f"NodeName={name} {address} Port={port} CPUs=1"
            for name, address, port in zip(names, where, ports[1:], strict=True)
        ]
        self._spool = tempfile.TemporaryDirectory()  # for sockets, whose paths must be short
        (folder / "state").mkdir()
        for name in names:
            Path(self._spool.name, name).mkdir()
        path = folder / "slurm.conf"
        path.write_text(
            CONFIGURATION.format(
                controller=controller, ports=ports, folder=folder, spool=self._spool.name, nodes="\n".join(lines)
            )
        )
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment = {**kept, "SLURM_CONF": str(path)}
        self._guards = ExitStack()  # ends the daemons also if the tests are killed
        self._daemons = [self._daemon(0, "slurmctld", "-D", "-c")]
        self._daemons += [self._daemon(node, "slurmd", "-D", "-N", name) for node, name in enumerate(names)]
        try:
            self.slurm("srun", f"--nodes={self._nodes}", "true")  # returns when all nodes are up
        except BaseException:
            self.close()
            raise

    def _on(self, node: int, command: Sequence[str]) -> Sequence[str]:
        return command if self._hosts is None else self._hosts.on(node, command)

    def _daemon(self, node: int, *command: str) -> subprocess.Popen[bytes]:
        if self._hosts is not None:
            command = ("sh", "-c", f'{MOUNT_CGROUPS} && exec "$@"', "sh", *command)
        daemon = subprocess.Popen(
            self._on(node, command),
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._guards.enter_context(guarded_group(daemon))
        return daemon

    def _first(self, command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node's host."""
        return subprocess.run(
            self._on(0, command), env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def slurm(self, *command: str) -> str:
        """Run one of Slurm's commands, which must succeed, and return what it prints."""
        done = self._first(command, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, script: str, nodes: int, folder: Path) -> str:
        """Submit a script as a batch job, wait until it has succeeded, and return its number."""
        path = folder / "batch.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        command = ("sbatch", "--parsable", f"--nodes={nodes}", f"--output={folder}/batch.out", "--wait", str(path))
        done = self._first(command, timeout=240)
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
                self._first(command, timeout=30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with suppress(subprocess.TimeoutExpired):  # it is killed next
                daemon.wait(timeout=30)
        self._guards.close()
        self._spool.cleanup()
