"""Two nodes: two launches of the `deepspeed` command, as on a cluster without ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import Case
from tests.support.harness import run
from tests.support.ports import free_port
from tests.support.training import train

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[1] / "support" / "node_script.py"


def launch(folder: Path, *arguments: list[list[int]]) -> list[Any]:
    """Launch one rank on each of two nodes, which meet on the loopback interface."""
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hosts), "--no_ssh"),
        *("--master_addr", "127.0.0.1", "--master_port", str(free_port())),
    ]
    nodes = [
        subprocess.Popen(
            [*command, "--node_rank", str(rank), str(SCRIPT), str(folder), *map(json.dumps, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.nightly
def test_two_nodes_train_rebalance_save_and_resume(tmp_path: Path) -> None:
    found = launch(tmp_path, [[0, 2, 8], [0, 6, 8], [0, 3, 8]], [[0, 7, 8]])
    still = run(2, train, Case(stages=2, precision="bf16 zero1", dropout=True), [], 8, 1)
    for rank in range(2):
        assert found[rank] == [[still[rank]["losses"][:4], [0, 3, 8]], [still[rank]["losses"][4:], [0, 7, 8]]]


@pytest.mark.nightly
def test_released_ranks_end_and_the_launcher_succeeds(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "3", "--master_port", str(free_port())]
    done = subprocess.run(
        [*launcher, str(SCRIPT.with_name("repack_script.py")), str(tmp_path), "exit"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"exit-{rank}.json").read_text()) for rank in range(3)]
    straight = run(3, train, Case(stages=3), [], 6, 1)[0]["losses"]
    assert found[0] == {"losses": straight, "steps": 6, "released": False}
    assert found[1] == found[2] == {"losses": straight[:2], "steps": 2, "released": True}
