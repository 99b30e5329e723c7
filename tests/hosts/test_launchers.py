"""The commands of docs/hosts.md, as they are printed: they train on three hosts, and go on with two of them."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.hosts.ssh import sshd_on
from tests.support.harness import run
from tests.support.namespaces import Network, name
from tests.support.pages import code_blocks
from tests.support.script import flags, run_script
from tests.support.slurm_cluster import Cluster, skip_without_slurm
from tests.support.watched_command import MARK, OF_LAUNCHERS, WatchedCommand

pytestmark = [pytest.mark.nightly, pytest.mark.ranks]

STEPS, STOP = 6, 4
OVER_SSH = "deepspeed over ssh"  # started once, for all hosts
ON_TWO = {  # what the page's command on three hosts becomes on two, where it prints no other
    "deepspeed without ssh": ("--hostfile hostfile", "--hostfile two"),
    "torchrun": ("--nnodes 3", "--nnodes 2"),
}


def commands(launcher: str) -> list[str]:
    """Return the page's command on three hosts, and that on two."""
    blocks = [block.rstrip() for block in code_blocks("hosts.md", launcher, "bash")]
    if launcher in ON_TWO:
        blocks.append(blocks[0].replace(*ON_TWO[launcher]) + " --resume run")
    return blocks


def has_ranks(command: WatchedCommand, number: int) -> bool:
    return len(command.processes("scripts/train.py --local_rank=0")) == number


@pytest.mark.parametrize("launcher", [OVER_SSH, *ON_TWO])
def test_a_run_on_three_hosts_goes_on_with_two(
    launcher: str, three_hosts: Network, checkout: Path, tmp_path: Path
) -> None:
    _, _, *more = flags(tmp_path, "dense", STEPS)
    more += ["--report", str(tmp_path / "report.jsonl")]
    (checkout / "two").write_text("node0 slots=1\nnode1 slots=1\n")
    variables = f"printf 'OMP_NUM_THREADS=1\\n{MARK}=%s\\n' ${MARK} > .deepspeed_env"
    with ExitStack() as stack:
        over_ssh = launcher == OVER_SSH
        path = stack.enter_context(sshd_on(three_hosts, tmp_path / "ssh")) if over_ssh else checkout
        begin = f"cd {checkout}; export PATH={path}:$PATH; {variables};"

        def start(host: int, command: str, stop: int) -> WatchedCommand:
            (folder := tmp_path / f"{stop}-{host}").mkdir()
            command = command.replace("--node_rank 0", f"--node_rank {host}")
            script = f"{begin} {command} {shlex.join(more)} --stop-at {stop}"
            return stack.enter_context(WatchedCommand(folder, three_hosts.on(host, ["bash", "-c", script])))

        for command, stop, num_hosts in zip(commands(launcher), (STOP, STEPS), (3, 2), strict=True):
            launched = [start(host, command, stop) for host in range(1 if over_ssh else num_hosts)]
            if over_ssh:  # the mark has reached the ranks
                launched[0].until(partial(has_ranks, launched[0], num_hosts))
            for watched in launched:
                assert not watched.left(*OF_LAUNCHERS), watched.output()
                assert watched.launcher.returncode == 0, watched.output()
    check_report(tmp_path)


def test_a_job_of_slurm_on_three_hosts_goes_on_with_two(three_hosts: Network, checkout: Path, tmp_path: Path) -> None:
    skip_without_slurm()
    _, _, *more = flags(tmp_path, "dense", STEPS)
    more += ["--report", str(tmp_path / "report.jsonl")]
    (block,) = code_blocks("hosts.md", "Slurm", "bash")
    script = f"cd {checkout}; export OMP_NUM_THREADS=1\n{block.rstrip()} {shlex.join(more)}"
    script = script.replace("--nproc-per-node 8", "--nproc-per-node 1")
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster", [name(host) for host in range(3)], three_hosts)
    try:
        for nodes, of_run in ((3, f"--stop-at {STOP}"), (2, f"--stop-at {STEPS} --resume run")):
            cluster.run(f"{script} {of_run}", nodes, tmp_path)
    finally:
        cluster.close()
    check_report(tmp_path)


def check_report(folder: Path) -> None:
    """Check that the run went on where it had stopped, with two stages, and trained as it does on one host."""
    records = [json.loads(line) for line in (folder / "report.jsonl").read_text().splitlines()]
    assert [record["stages"] for record in records if record["kind"] == "start"] == [3, 2]
    losses = [record["train_loss"] for record in records if record["kind"] == "step"]
    assert losses == run(3, run_script, flags(folder, "dense", STEPS))[0]["losses"]
