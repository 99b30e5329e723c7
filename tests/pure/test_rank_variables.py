"""What launchers say about a rank, as the variables of torch."""

from __future__ import annotations

import re

import pytest

from ds_dynmo.cli.rank_variables import set_rank_variables
from ds_dynmo.errors import ConfigError

SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
RANK_3 = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}),
        ({"MASTER_PORT": "29501"}, {"WORLD_SIZE": "1", "MASTER_PORT": "29501"}),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[07-12]"}, {**RANK_3, "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, {**RANK_3, "MASTER_ADDR": "127.0.0.1"}),
        ({**SLURM, "SLURM_STEP_NODELIST": "a,b", "MASTER_ADDR": "c"}, {**RANK_3, "MASTER_ADDR": "c"}),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, {"RANK": "0", "WORLD_SIZE": "1"}),  # no srun
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {**RANK_3, "MASTER_ADDR": "127.0.0.1"}),
        ({**OPEN_MPI, "MASTER_ADDR": "c", "MASTER_PORT": "1"}, {**RANK_3, "MASTER_ADDR": "c", "MASTER_PORT": "1"}),
        ({**MPICH, **SLURM, "SLURM_PROCID": "0"}, {**RANK_3, "MASTER_ADDR": "127.0.0.1"}),
    ],
)
def test_ranks_are_found_by_what_the_launcher_says(said: dict[str, str], expected: dict[str, str]) -> None:
    environment = dict(said)
    set_rank_variables(environment)
    assert environment == {**environment, **said, **expected}


def test_a_launcher_that_sets_the_variables_is_left_alone() -> None:
    """DeepSpeed's and torchrun do; also if they were started by srun."""
    said = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "c", "MASTER_PORT": "1", **SLURM}
    environment = dict(said)
    set_rank_variables(environment)
    assert environment == said


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("one", "one"), ("a,b", "a"), ("gpu[007-012,15]-ib,login1", "gpu007-ib"), ("r[3,9]", "r3"), ("a-1,b[2-3]", "a-1")],
)
def test_rank_0_is_on_the_first_node(nodes: str, first: str) -> None:
    environment = {**SLURM, "SLURM_STEP_NODELIST": nodes}
    set_rank_variables(environment)
    assert environment["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "c"}, "WORLD_SIZE is set, but not RANK, LOCAL_RANK, MASTER_PORT"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE = 4, OMPI_COMM_WORLD_LOCAL_SIZE = 2"),
        ({**MPICH, "MPI_LOCALNRANKS": "3"}, "PMI_SIZE = 4, MPI_LOCALNRANKS = 3: ranks are on several hosts"),
    ],
)
def test_ranks_that_could_not_meet_are_refused(said: dict[str, str], message: str) -> None:
    environment = dict(said)
    with pytest.raises(ConfigError, match=re.escape(message)):
        set_rank_variables(environment)
    assert environment == said
