"""Set the variables by which ranks meet, for the launchers that call them otherwise."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from typing import NamedTuple

from ds_dynmo.errors import ConfigError

LOCALHOST = "127.0.0.1"
PORT = "29500"  # DeepSpeed's and torchrun's default
ANY_FREE_PORT = "0"  # a rank alone need not be found
OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
OF_MEETING = ("MASTER_ADDR", "MASTER_PORT")


class Launcher(NamedTuple):
    """What a launcher calls :data:`OF_RANK`; and the ranks of this host, if it says how many they are."""

    rank: str
    world_size: str
    local_rank: str
    local_size: str | None = None

    def has_started(self, environment: MutableMapping[str, str]) -> bool:
        return all(name in environment for name in self[:3])


SRUN = Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
LAUNCHERS = (  # in a job of Slurm, mpirun is itself started by srun, so it comes first
    Launcher(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH
    SRUN,
)


def set_rank_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variables where the launcher has not: ``srun``, ``mpirun``, or none, so that this rank is alone.

    ``MASTER_ADDR`` and ``MASTER_PORT`` stay as they are, if they are set.

    Raises:
        ConfigError: some of the variables are set and others are missing, or nothing says where rank 0 is.
    """
    if any(name in environment for name in OF_RANK):
        missing = [name for name in (*OF_RANK, *OF_MEETING) if name not in environment]
        if missing:
            there = next(name for name in OF_RANK if name in environment)
            raise ConfigError(f"{there} is set, but not {', '.join(missing)}: should all be set, or none of {OF_RANK}")
        return
    launcher = next((one for one in LAUNCHERS if one.has_started(environment)), None)
    if launcher is None:
        numbers, host, port = ["0", "1", "0"], LOCALHOST, ANY_FREE_PORT
    else:
        numbers, port = [environment[name] for name in launcher[:3]], PORT
        host = environment.get("MASTER_ADDR") or _first_host(launcher, environment)
    environment.update(zip(OF_RANK, numbers))
    environment.setdefault("MASTER_ADDR", host)
    environment.setdefault("MASTER_PORT", port)


def _first_host(launcher: Launcher, environment: MutableMapping[str, str]) -> str:
    """Name the host of rank 0.

    Raises:
        ConfigError: MPI has started ranks on several hosts; it names none of them.
    """
    if launcher is SRUN:
        if environment.get("SLURM_STEP_NUM_NODES") == "1":
            return LOCALHOST
        return _first_of_nodes(environment["SLURM_STEP_NODELIST"])
    size, here = environment[launcher.world_size], environment.get(str(launcher.local_size))
    if here != size:
        raise ConfigError(
            f"{launcher.world_size} = {size}, {launcher.local_size} = {here}: ranks are on several hosts, so "
            "MASTER_ADDR should be set, to the host of rank 0 (Open MPI: mpirun -x MASTER_ADDR=...)"
        )
    return LOCALHOST


def _first_of_nodes(nodes: str) -> str:
    """Name the first of a list of nodes in Slurm's short form: gpu007-ib for ``gpu[007-012,15]-ib,login1``."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    assert found is not None, nodes
    return "".join(part or "" for part in found.groups())
