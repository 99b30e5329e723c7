"""What launchers say about a rank, as the variables of torch."""

from __future__ import annotations

import re

import pytest

from ds_dynmo import set_rank_variables
from ds_dynmo.errors import ConfigError

SLURM = {
    **{"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"},
}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
OF_ONE = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
RANK_3 = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
TORCHS = {**RANK_3, "MASTER_ADDR": "c", "MASTER_PORT": "1"}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def nodes(names: str, ranks: str = "2(x2)", node: str = "1") -> dict[str, str]:
    return {**SLURM, "SLURM_STEP_NODELIST": names, "SLURM_STEP_TASKS_PER_NODE": ranks, "SLURM_NODEID": node}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (nodes("gpu[07-12]"), {**RANK_3, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}),
        (nodes("a", "4", "0"), {**RANK_3, "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}),
        (nodes("a[1-3]", "1(x2),2", "2"), {**RANK_3, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a1"}),
        (
            {**nodes("a,b"), "MASTER_ADDR": "c", "MASTER_PORT": ""},
            {**RANK_3, "MASTER_ADDR": "c", "MASTER_PORT": "29500"},
        ),
        (OPEN_MPI, {**RANK_3, "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}),
        ({**OPEN_MPI, "MASTER_ADDR": "c", "MASTER_PORT": "1"}, {**RANK_3, "MASTER_ADDR": "c", "MASTER_PORT": "1"}),
        ({**MPICH, **SLURM, "SLURM_PROCID": "0"}, {**RANK_3, "MASTER_ADDR": "127.0.0.1"}),
        ({**SLURM, **TORCHS, "RANK": "2"}, {**TORCHS, "RANK": "2"}),  # deepspeed and torchrun, started by srun
    ],
)
def test_ranks_are_found_by_what_the_launcher_says(said: dict[str, str], expected: dict[str, str]) -> None:
    environment = dict(said)
    assert set_rank_variables(environment)
    assert environment == {**environment, **expected}
    assert {name: environment[name] for name in said if name not in expected} == {
        name: value for name, value in said.items() if name not in expected
    }


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {**ALONE, "MASTER_PORT": "0"}),
        ({"MASTER_PORT": "29501"}, {**ALONE, "MASTER_PORT": "29501"}),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, ALONE),  # a batch script, without srun
    ],
)
def test_a_rank_without_a_launcher_is_alone(said: dict[str, str], expected: dict[str, str]) -> None:
    environment = dict(said)
    assert not set_rank_variables(environment)
    assert environment == {**environment, **said, **expected}


@pytest.mark.parametrize(
    ("names", "first"),
    [
        *(("one", "one"), ("a,b", "a"), ("gpu[007-012,15]-ib,login1", "gpu007-ib"), ("r[3,9]", "r3")),
        *(("a-1,b[2-3]", "a-1"), ("rack[2-3]node[14-15]", "rack2node14")),
    ],
)
def test_rank_0_is_on_the_first_node(names: str, first: str) -> None:
    environment = nodes(names)
    set_rank_variables(environment)
    assert environment["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "c"},
            "WORLD_SIZE is set, but not RANK, LOCAL_RANK, MASTER_PORT: set all",
        ),
        ({**TORCHS, "MASTER_ADDR": ""}, "RANK is set, but not MASTER_ADDR: set all of RANK, WORLD_SIZE, LOCAL_RANK,"),
        ({**TORCHS, "RANK": "4"}, "RANK = 4: should be less than WORLD_SIZE, 4"),
        ({**TORCHS, "WORLD_SIZE": "two"}, "WORLD_SIZE = two: should be a whole number"),
        ({**TORCHS, "LOCAL_RANK": "-1"}, "LOCAL_RANK = -1: should be a whole number"),
        ({**TORCHS, "MASTER_PORT": "0"}, "MASTER_PORT = 0: should be in 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT = 65536: should be in 1 to 65535"),
        (
            SLURM,
            "SLURM_STEP_NUM_TASKS = 4, SLURM_STEP_TASKS_PER_NODE = 2(x2): ranks are on several hosts, so MASTER_ADDR",
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "OMPI_COMM_WORLD_SIZE = 4, OMPI_COMM_WORLD_LOCAL_SIZE = 2: ranks are on several hosts",
        ),
        ({**MPICH, "MPI_LOCALNRANKS": "3"}, "PMI_SIZE = 4, MPI_LOCALNRANKS = 3: ranks are on several hosts"),
        (
            {"PMIX_RANK": "1"},
            "PMIX_RANK is set, by a launcher that is not known: set RANK, WORLD_SIZE, LOCAL_RANK,",
        ),
        ({"MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_RANK is set, by a launcher that is not known"),
        ({"FLUX_TASK_RANK": "1"}, "FLUX_TASK_RANK is set, by a launcher that is not known"),
        (
            {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
            "SLURM_PROCID = 3, and SLURM_STEP_NUM_TASKS, SLURM_STEP_TASKS_PER_NODE not set: srun has started several",
        ),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID = 2: SLURM_STEP_TASKS_PER_NODE = 2(x2) says nothing of this"),
        ({**SLURM, **OF_ONE}, "OMPI_COMM_WORLD_SIZE = 1, and SLURM_STEP_NUM_TASKS = 4: two launchers have set"),
        ({**MPICH, **OF_ONE}, "OMPI_COMM_WORLD_SIZE = 1, and PMI_SIZE = 4: two launchers have set their variables"),
        ({"RANK": "", "WORLD_SIZE": ""}, "RANK, WORLD_SIZE: should not be empty"),
    ],
)
def test_ranks_that_could_not_meet_are_refused(said: dict[str, str], message: str) -> None:
    environment = dict(said)
    with pytest.raises(ConfigError, match=re.escape(message)):
        set_rank_variables(environment)
    assert environment == said
