"""Release policy "slurm", against a real Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_dynmo.config import RepackConfig, parse_block
from ds_dynmo.engine.elastic.release import RankLocation, ReleasePolicy, ReleaseRefused, check_policy, policy_for
from ds_dynmo.errors import ConfigError
from tests.local.slurm_cluster import Cluster, skip_without_slurm

SLURM = parse_block(RepackConfig, {"release": "slurm"}, "repack")
IMPATIENT = parse_block(RepackConfig, {"release": "slurm", "release_timeout_seconds": 0.5}, "repack")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    skip_without_slurm()
    started = Cluster(tmp_path_factory.mktemp("slurm"), ["node1", "node2", "node3"])
    yield started
    started.close()


@pytest.fixture
def cluster(running: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("SLURM_CONF", running.environment["SLURM_CONF"])
    return running


@pytest.fixture
def job(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    number = cluster.allocate(3)
    monkeypatch.setenv("SLURM_JOB_ID", number)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    yield number
    cluster.slurm("scancel", number)


def policy(config: RepackConfig = SLURM) -> ReleasePolicy:
    return policy_for(config)


def locations(*nodes: int) -> list[RankLocation]:
    """Make a rank on each of these nodes."""
    return [RankLocation(node - 1, f"node{node}", "cuda:0") for node in nodes]


def test_nodes_leave_the_job_and_the_rest_stay(cluster: Cluster, job: str) -> None:
    assert policy().release(locations(2), locations(1, 3)) == f"nodes ['node2'] have left job {job}"
    assert cluster.job(job)["NodeList"] == "node[1,3]" and cluster.idle() == {"node2"}
    policy().release(locations(2), locations(1, 3))  # may be called again
    assert cluster.job(job)["NodeList"] == "node[1,3]" and cluster.job(job)["JobState"] == "RUNNING"


def test_a_node_with_a_rank_at_work_stays(cluster: Cluster, job: str) -> None:
    assert policy().release(locations(2), locations(1, 2, 3)) == "nodes ['node2'] stay"
    assert cluster.job(job)["NodeList"] == "node[1-3]"


def test_the_node_of_the_batch_script_stays(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = cluster.start("sleep 600", nodes=3, folder=tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", number)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    try:
        said = policy().release(locations(1, 2), locations(3))
        assert said == f"nodes ['node2'] have left job {number}; nodes ['node1'] stay"
        assert cluster.job(number)["NodeList"] == "node[1,3]" and cluster.job(number)["JobState"] == "RUNNING"
    finally:
        cluster.slurm("scancel", number)


def test_hosts_that_are_not_nodes_of_the_job_are_refused(cluster: Cluster, job: str) -> None:
    elsewhere = [RankLocation(1, "node2.example.org", "cuda:0")]
    with pytest.raises(ReleaseRefused, match=r"\['node2.example.org'\] are not nodes of job .* started by srun"):
        policy().release(elsewhere, locations(1, 3))
    assert cluster.job(job)["NodeList"] == "node[1-3]"


def test_nodes_of_other_jobs_stay(cluster: Cluster, job: str) -> None:
    policy().release(locations(2, 3), locations(1))
    other = cluster.allocate(2)
    try:
        policy().release(locations(2, 3), locations(1))
        assert cluster.job(other)["NodeList"] == "node[2-3]"
    finally:
        cluster.slurm("scancel", other)


def test_no_files_are_left_in_the_users_folder(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy().release(locations(2), locations(1, 3))
    assert os.listdir(tmp_path) == []


def test_a_job_that_has_ended_is_a_refusal(cluster: Cluster, job: str) -> None:
    cluster.slurm("scancel", job)
    with pytest.raises(ReleaseRefused, match=f"scontrol update JobId={job} .*finished"):
        policy().release(locations(2), locations(1, 3))


def test_outside_slurm_a_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ReleaseRefused, match="does not run in a job of Slurm: SLURM_JOB_ID or SLURM_JOB_NODELIST"):
        policy().release(locations(2), locations(1, 3))


def test_a_controller_that_does_not_answer_is_a_refusal(
    cluster: Cluster, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Path(cluster.environment["SLURM_CONF"]).read_text()
    elsewhere = re.sub(r"SlurmctldPort=\d+", f"SlurmctldPort={cluster.free_port}", settings)  # nobody listens there
    (tmp_path / "slurm.conf").write_text(elsewhere)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(ReleaseRefused, match=f"scontrol show job --oneliner {job}: "):
        policy(IMPATIENT).release(locations(2), locations(1, 3))


def test_the_command_scontrol_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="needs Slurm's command scontrol"):
        check_policy(SLURM)
