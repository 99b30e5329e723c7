"""Give nodes back to Slurm: those on which all ranks were released leave the running job.

``scontrol update`` takes whole nodes from a running job, which its owner may do, and kills what still runs on them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from ds_dynmo.engine.elastic.release.policy import RankLocation, ReleaseRefused
from ds_dynmo.errors import ConfigError

JOB, NODES = "SLURM_JOB_ID", "SLURM_JOB_NODELIST"  # where Slurm tells a process its job, and with which nodes it began


def check_scontrol() -> None:
    """Refuse the policy where Slurm's command is missing.

    Raises:
        ConfigError: says what is missing.
    """
    if shutil.which("scontrol") is None:
        raise ConfigError('dynmo.repack.release = "slurm" needs Slurm\'s command scontrol, which is not on the PATH')


class Slurm:
    """Takes nodes out of the job that this process runs in. Released ranks' processes end.

    The node of the batch script stays, whatever runs there: the job would end with it.

    Args:
        timeout_seconds: of one command.
    """

    silent, parks, restarts = False, False, False

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds

    def release(self, released: Sequence[RankLocation], staying: Sequence[RankLocation]) -> str:
        """Make one update for all nodes; those that have left the job already count as done."""
        job, began_with = os.environ.get(JOB), os.environ.get(NODES)
        if not job or not began_with:
            raise ReleaseRefused(f"this process does not run in a job of Slurm: {JOB} or {NODES} is not set")
        hosts = {at.host for at in released}
        if unknown := sorted(hosts - set(self._hostnames(began_with))):
            raise ReleaseRefused(f"{unknown} are not nodes of job {job}, {began_with}: ranks should be started by srun")
        described = self._scontrol("show", "job", "--oneliner", job)
        needed = {at.host for at in staying} | {_field("BatchHost", described)}
        left = sorted({at.host for at in released} - needed)
        shared = sorted({at.host for at in released} & needed)
        nodes = self._hostnames(_field("NodeList", described))
        kept = [node for node in nodes if node not in left]
        if len(kept) < len(nodes):
            self._scontrol("update", f"JobId={job}", f"NodeList={','.join(kept)}")
        found = [f"nodes {left} have left job {job}" if left else "", f"nodes {shared} stay" if shared else ""]
        return "; ".join(filter(None, found))

    def _hostnames(self, nodes: str) -> list[str]:
        """Expand a list of nodes into their names."""
        return self._scontrol("show", "hostnames", nodes).split()

    def _scontrol(self, *arguments: str) -> str:
        """Run Slurm's command. It leaves files in its working directory, for shells: not in the user's."""
        command = ["scontrol", *arguments]
        try:
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, timeout=self._timeout_seconds, check=False
                )
        except subprocess.TimeoutExpired as error:
            raise ReleaseRefused(f"{' '.join(command)}: no answer in {self._timeout_seconds:g} s") from error
        except OSError as error:
            raise ReleaseRefused(f"{' '.join(command)}: {error}") from error
        if done.returncode:
            raise ReleaseRefused(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout


def _field(name: str, described: str) -> str:
    """Read a field of a job's description; empty if it has none, as the batch host of an interactive one."""
    found = re.search(rf"(?<!\S){name}=(\S*)", described)
    return found[1] if found else ""
