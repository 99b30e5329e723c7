"""A job of a real Slurm that trains, re-packs, releases nodes as the documentation says and continues."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.configs import Case
from tests.support.harness import run
from tests.support.pages import code_blocks
from tests.support.slurm_cluster import Cluster, skip_without_slurm
from tests.support.training import train

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[2] / "support" / "repack_script.py"


@pytest.mark.nightly
def test_nodes_of_released_ranks_leave_the_job_and_it_continues(tmp_path: Path) -> None:
    skip_without_slurm()
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster", ["node1", "node2", "node3"])
    release = tmp_path / "release.sh"
    release.write_text(code_blocks("elastic.md", "command", "bash")[0])
    command = [sys.executable, str(SCRIPT), str(tmp_path), "command", "bash", str(release)]
    rank = "RANK=$SLURM_PROCID LOCAL_RANK=0 exec " + shlex.join(command)
    try:
        job = cluster.run(
            f"export MASTER_ADDR=127.0.0.1 WORLD_SIZE=3 OMP_NUM_THREADS=1 MASTER_PORT={cluster.free_port}\n"
            f"srun --ntasks=3 --wait=0 bash -c {shlex.quote(rank)}",
            nodes=3,
            folder=tmp_path,
        )
        ended = cluster.job(job)
    finally:
        cluster.close()
    output = (tmp_path / "batch.out").read_text()
    assert (ended["JobState"], ended["ExitCode"], ended["NodeList"]) == ("COMPLETED", "0:0", "node1"), output
    found = [json.loads((tmp_path / f"command-{rank}.json").read_text()) for rank in range(3)]
    straight = run(3, train, Case(stages=3), [], 6, 1)[0]["losses"]
    assert found[0] == {"losses": straight, "steps": 6, "released": False}
    assert found[1] == found[2] == {"losses": straight[:2], "steps": 2, "released": True}
