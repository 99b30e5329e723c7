"""How ranks meet under each launcher, and end with it.

Launchers other than ``deepspeed`` and ``torchrun`` use other names for the variables by which ranks meet. The
``deepspeed`` command starts a launcher on each node, which starts the ranks; if either is killed with SIGKILL, the
processes that it started go on.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from itertools import dropwhile
from typing import NamedTuple

import psutil  # comes with DeepSpeed

from ds_dynmo.errors import ConfigError

LOCALHOST = "127.0.0.1"
PORT = "29500"  # DeepSpeed's and torchrun's default
ANY_FREE_PORT = "0"  # a job of one rank: no other rank has to know it
OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
OF_MEETING = ("MASTER_ADDR", "MASTER_PORT")
ALL = (*OF_RANK, *OF_MEETING)
RANKS_HERE = "LOCAL_WORLD_SIZE"  # torchrun's name


class Launcher(NamedTuple):
    """A launcher's names for :data:`OF_RANK`, and for the number of ranks on this host or on each."""

    rank: str
    world_size: str
    local_rank: str
    ranks_here: str

    def has_started(self, environment: Mapping[str, str]) -> bool:
        return all(name in environment for name in self)


OPEN_MPI = Launcher(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
MPICH = Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SRUN = Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
LAUNCHERS = (OPEN_MPI, MPICH, SRUN)  # in a job of Slurm, mpirun is itself started by srun, so that comes last
OF_OTHER_LAUNCHERS = (
    *("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),  # of MPI
    *("PALS_RANKID", "ALPS_APP_PE", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK"),  # of HPE, IBM, Flux
)

POLL_SECONDS = 1.0
GRACE_SECONDS = 30.0  # to end after SIGTERM, as DeepSpeed's launcher gives
WATCHING = "end with launcher"  # name of the thread
NODE_LAUNCHER = "deepspeed.launcher.launch"


# -- meet ----------------------------------------------------------------------------------------------


def set_rank_variables(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Set torch's variables where the launcher has not: ``srun``, ``mpirun``, or none, so that this rank is alone.

    ``MASTER_ADDR`` and ``MASTER_PORT`` stay as they are, if they are set.

    Returns:
        Whether a launcher has started this rank.

    Raises:
        ConfigError: some variables are set and others are missing, one has no valid value, or nothing says where
            rank 0 is. No variable was set.
    """
    launcher = next((known for known in LAUNCHERS if known.has_started(environment)), None)
    launched = True
    if any(name in environment for name in OF_RANK):
        variables = _of_torch(environment)
    elif launcher is not None:
        _refuse_left_over(launcher, environment)
        variables = {name: environment[of_launcher] for name, of_launcher in zip((*OF_RANK, RANKS_HERE), launcher)}
        if launcher is SRUN:
            variables[RANKS_HERE] = _of_this_node(environment[SRUN.ranks_here], environment.get("SLURM_NODEID", "0"))
        variables["MASTER_ADDR"] = environment.get("MASTER_ADDR") or _first_host(launcher, variables, environment)
        variables["MASTER_PORT"] = environment.get("MASTER_PORT") or PORT
    else:
        _refuse_other_launchers(environment)
        launched = False
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        variables["MASTER_ADDR"] = environment.get("MASTER_ADDR") or LOCALHOST
        variables["MASTER_PORT"] = environment.get("MASTER_PORT") or ANY_FREE_PORT
    _check(variables)
    environment.update(variables)
    return launched


def _of_torch(environment: Mapping[str, str]) -> dict[str, str]:
    """Take the variables of a launcher that sets them itself.

    Raises:
        ConfigError: it has not set all of them.
    """
    missing = [name for name in ALL if not environment.get(name)]
    if missing:
        there = next((name for name in ALL if name not in missing), None)
        if there is None:
            raise ConfigError(f"{', '.join(name for name in OF_RANK if name in environment)}: should not be empty")
        raise ConfigError(f"{there} is set, but not {', '.join(missing)}: set all of {', '.join(ALL)}, or none")
    return {name: environment[name] for name in ALL}


def _refuse_other_launchers(environment: Mapping[str, str]) -> None:
    """Refuse to run as the only rank if an unknown launcher has started this one, and perhaps others.

    Raises:
        ConfigError: naming its variable.
    """
    for name in OF_OTHER_LAUNCHERS:
        if name in environment:
            raise ConfigError(f"{name} is set, by a launcher that is not known: set {', '.join(ALL)} too")
    rank = environment.get(SRUN.rank, "0")
    if rank != "0":  # a batch script is rank 0
        missing = [name for name in SRUN if name not in environment]
        raise ConfigError(
            f"{SRUN.rank} = {rank}, and {', '.join(missing)} not set: srun has started several ranks; pass its other "
            f"variables on, or set {', '.join(ALL)} too"
        )


def _refuse_left_over(launcher: Launcher, environment: Mapping[str, str]) -> None:
    """Refuse variables that an earlier launcher left: by them this rank is alone, but another started several.

    Raises:
        ConfigError: naming the variables of both.
    """
    for other in LAUNCHERS:
        if other.has_started(environment) and environment[launcher.world_size] == "1" != environment[other.world_size]:
            raise ConfigError(
                f"{launcher.world_size} = 1, and {other.world_size} = {environment[other.world_size]}: two launchers "
                f"have set their variables; unset those of the one that did not start these ranks, or set "
                f"{', '.join(ALL)}"
            )


def _check(variables: Mapping[str, str]) -> None:
    """Check the values.

    Raises:
        ConfigError: naming the variable.
    """
    for name in (*OF_RANK, "MASTER_PORT"):
        if not variables[name].isdecimal():
            raise ConfigError(f"{name} = {variables[name]}: should be a whole number")
    rank, world_size, port = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= world_size:
        raise ConfigError(f"RANK = {rank}: should be less than WORLD_SIZE, {world_size}")
    if not (1 <= port < 2**16 or (port == 0 and world_size == 1)):
        raise ConfigError(f"MASTER_PORT = {port}: should be in 1 to 65535")


def _of_this_node(ranks_of_nodes: str, node: str) -> str:
    """Read the number of ranks on this node from Slurm's short form; ``2(x3),1``: 2 on each of three nodes, then 1.

    Raises:
        ConfigError: it says nothing of this node.
    """
    by_node: list[str] = []
    try:
        for part in ranks_of_nodes.split(","):
            ranks, _, times = part.partition("(x")
            by_node += [ranks] * int(times.rstrip(")") or 1)
        return by_node[int(node)]
    except (ValueError, IndexError):
        raise ConfigError(
            f"SLURM_NODEID = {node}: {SRUN.ranks_here} = {ranks_of_nodes} says nothing of this node"
        ) from None


def _first_host(launcher: Launcher, variables: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Return the host of rank 0.

    Raises:
        ConfigError: ranks are on several hosts, and the launcher does not name them.
    """
    if variables[RANKS_HERE] == variables["WORLD_SIZE"]:
        return LOCALHOST
    nodes = environment.get("SLURM_STEP_NODELIST") if launcher is SRUN else None
    if not nodes:
        ranks = ", ".join(f"{name} = {environment[name]}" for name in (launcher.world_size, launcher.ranks_here))
        raise ConfigError(
            f"{ranks}: ranks are on several hosts, so MASTER_ADDR should be set, to the host of rank 0 "
            "(Open MPI: mpirun -x MASTER_ADDR=...)"
        )
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).split(",")[0]  # gpu007-ib for gpu[007-012,15]-ib,login1


# -- end with the launcher -----------------------------------------------------------------------------


def end_with_launcher() -> None:
    """End this process and its children soon after one of its launchers dies, at once if one has died already.

    It sends SIGTERM, and SIGKILL 30 seconds later, as DeepSpeed's launcher does. The launchers are the unbroken line of
    parents whose command lines end with this program and its arguments: ``deepspeed``, its launcher on the node,
    ``torchrun``, ``mpirun``, ... A program without such a parent is left alone. Later calls are no-ops.
    """
    if any(thread.name == WATCHING for thread in threading.enumerate()):
        return
    launchers = _launchers()
    if _has_lost_launcher(launchers[-1] if launchers else psutil.Process()):
        _end()
    elif launchers:
        threading.Thread(target=_end_after, args=(launchers,), name=WATCHING, daemon=True).start()


def _launchers() -> list[psutil.Process]:
    """Find the launchers of this process, from its parent up."""
    rank = psutil.Process()
    program = _by_name(_program(rank.cmdline()))
    parents = []
    parent = rank.parent()
    while program and parent is not None and _program_of(parent, len(program)) == program:
        parents.append(parent)
        parent = parent.parent()
    return parents


def _program(command_line: Sequence[str]) -> list[str]:
    """Return the program that an interpreter runs, with its arguments, without those that DeepSpeed's launcher adds."""
    given = dropwhile(lambda word: word.startswith("-"), command_line[1:])
    return [word for word in given if not word.startswith("--local_rank=")]


def _program_of(launcher: psutil.Process, words: int) -> list[str]:
    """Return the program that a launcher would start, if it and its arguments are so many words."""
    return _by_name(_command_line(launcher)[-words:])


def _by_name(program: Sequence[str]) -> list[str]:
    """Leave out the folder of a program, which a launcher may have found on its path."""
    return [os.path.basename(word) if number == 0 else word for number, word in enumerate(program)]


def _command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _has_lost_launcher(top: psutil.Process) -> bool:
    """Return whether the process that started ``top`` has died.

    Only what DeepSpeed started shows it: ranks are children of a launcher on their node, whose parent is the
    ``deepspeed`` command unless it was given its node's number, over ssh for example.

    Args:
        top: the uppermost launcher that runs, or this process.
    """
    if top.pid == os.getpid():
        started_by_deepspeed = "CROSS_RANK" in os.environ
    else:
        words = _command_line(top)
        started_by_deepspeed = NODE_LAUNCHER in words and not any(word.startswith("--node_rank") for word in words)
    return started_by_deepspeed and _is_adopted(top)


def _is_adopted(process: psutil.Process) -> bool:
    """Return whether the parent of ``process`` has died: an orphan's parent is in another session."""
    with suppress(psutil.Error, OSError):
        parent = process.ppid()
        session = os.getsid(process.pid)
        return parent == 1 or (session != process.pid and session != os.getsid(parent))
    return True  # it ended meanwhile, or its parent did


def _end_after(launchers: Sequence[psutil.Process]) -> None:
    """End this process when one of ``launchers`` has died."""
    while all(map(_runs, launchers)):
        time.sleep(POLL_SECONDS)
    _end()


def _end() -> None:
    """End this process and its children."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended, or is another user's
            child.terminate()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _runs(process: psutil.Process) -> bool:
    """Return whether ``process`` runs. An ended one is a zombie until its parent has waited for it."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
