"""What launchers say about a rank, as the variables of torch."""

from __future__ import annotations

import re

import pytest

from ds_dynmo import set_rank_variables
from ds_dynmo.errors import ConfigError

SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}
OF_ONE = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}
TORCHS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "c", "MASTER_PORT": "1"}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("said", [TORCHS, {**SLURM, **TORCHS, "RANK": "2"}, {**OPEN_MPI, **TORCHS}])
def test_ranks_are_those_of_torchrun_and_deepspeed_whatever_started_these(said: dict[str, str]) -> None:
    environment = dict(said)
    assert set_rank_variables(environment) and environment == said


def test_gloo_uses_an_interface_that_reaches_rank_0() -> None:
    environment = {**TORCHS, "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "4"}
    assert set_rank_variables(environment) and environment["GLOO_SOCKET_IFNAME"].startswith("lo")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {**ALONE, "MASTER_PORT": "0"}),
        ({"MASTER_PORT": "29501", "MASTER_ADDR": ""}, {**ALONE, "MASTER_PORT": "29501"}),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, ALONE),  # a batch script, without srun
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ALONE),
        ({**OF_ONE, "PMI_RANK": "0", "PMI_SIZE": "1"}, ALONE),
    ],
)
def test_a_rank_without_a_launcher_is_alone(said: dict[str, str], expected: dict[str, str]) -> None:
    environment = dict(said)
    assert not set_rank_variables(environment)
    assert environment == {**environment, **{name: value for name, value in said.items() if value}, **expected}


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
            "SLURM_PROCID = 3, and RANK is not set: srun, mpirun or the like has started this process; let it start",
        ),
        ({**SLURM, "SLURM_PROCID": "0"}, "SLURM_PROCID = 0, and RANK is not set"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID = 3, and RANK is not set"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK = 0, and RANK is not set: srun, mpirun or the like"),
        ({**SLURM, **OF_ONE}, "SLURM_PROCID = 3, and RANK is not set"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, "PMI_RANK = 3, and RANK is not set"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK = 1, and RANK is not set"),
        ({"MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_RANK = 0, and RANK is not set"),
        ({"FLUX_TASK_RANK": "1"}, "FLUX_TASK_RANK = 1, and RANK is not set"),
        ({"RANK": "", "WORLD_SIZE": ""}, "RANK, WORLD_SIZE: should not be empty"),
    ],
)
def test_ranks_that_could_not_meet_are_refused(said: dict[str, str], message: str) -> None:
    environment = dict(said)
    with pytest.raises(ConfigError, match=re.escape(message)):
        set_rank_variables(environment)
    assert environment == said
