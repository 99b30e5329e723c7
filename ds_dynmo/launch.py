"""How ranks meet under each launcher, and end with it.

``deepspeed`` and ``torchrun`` set the variables by which ranks meet. The ``deepspeed`` command starts a launcher on
each node, which starts the ranks; if either is killed with SIGKILL, the processes that it started go on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from itertools import dropwhile

import psutil  # comes with DeepSpeed

from ds_dynmo.errors import ConfigError
from ds_dynmo.interface import choose_interface

OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
OF_MEETING = ("MASTER_ADDR", "MASTER_PORT")
ALL = (*OF_RANK, *OF_MEETING)
ALONE = dict(zip(ALL, ("0", "1", "0", "127.0.0.1", "0")))  # any free port: no other rank has to know it
TASKS = {  # names of a task's number, and of the number of tasks
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMIX_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
    **dict.fromkeys(("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"), ""),  # of MPI
    **dict.fromkeys(("PALS_RANKID", "ALPS_APP_PE", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK"), ""),  # of HPE, IBM, Flux
}

POLL_SECONDS = 1.0
GRACE_SECONDS = 30.0  # to end after SIGTERM, as DeepSpeed's launcher gives
WATCHING = "end with launcher"  # name of the thread
NODE_LAUNCHER = "deepspeed.launcher.launch"


# -- meet ----------------------------------------------------------------------------------------------


def set_rank_variables(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Set torch's variables where no launcher has: this rank is alone. ``MASTER_ADDR`` and ``MASTER_PORT`` may be set.

    Where ``GLOO_SOCKET_IFNAME`` is not set, it is set too (:mod:`ds_dynmo.interface`).

    Returns:
        Whether a launcher has started this rank.

    Raises:
        ConfigError: some variables are set and others are missing, one has no valid value, or ``srun`` or ``mpirun``
            has started several tasks, and no ``torchrun`` their ranks. No variable was set.
    """
    launched = any(name in environment for name in OF_RANK)
    if launched:
        variables = _of_torch(environment)
    else:
        _refuse_tasks(environment)
        variables = {name: environment.get(name) or value for name, value in ALONE.items()}
    _check(variables)
    environment.update(variables)
    choose_interface(environment)
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


def _refuse_tasks(environment: Mapping[str, str]) -> None:
    """Refuse to run as the only rank if another launcher has started this task and others.

    Raises:
        ConfigError: naming its variable.
    """
    for name, count in TASKS.items():
        of_batch_script = name == "SLURM_PROCID" and environment.get(name) == "0" and count not in environment
        if name in environment and environment.get(count) != "1" and not of_batch_script:
            raise ConfigError(
                f"{name} = {environment[name]}, and RANK is not set: srun, mpirun or the like has started this "
                "process; let it start torchrun, once on each host, or start deepspeed, see docs/hosts.md"
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


# -- end the launcher ----------------------------------------------------------------------------------


def end_restarts() -> None:
    """End the agent of torchrun that started this rank, if it would start it again after a failure.

    For an error that every start would repeat. Each host's ranks end their own agent.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        for agent in _launchers()[:1]:
            with suppress(psutil.Error):
                agent.terminate()


# -- end with the launcher -----------------------------------------------------------------------------


def end_with_launcher() -> None:
    """End this process and its children soon after one of its launchers dies, at once if one has died already.

    It sends SIGTERM, and SIGKILL 30 seconds later, as DeepSpeed's launcher does. The launchers are the unbroken line of
    parents whose command lines end with this program and its arguments: ``deepspeed``, its launcher on the node,
    ``torchrun``, and what started it. A program without such a parent is left alone. Later calls are no-ops.
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
    while all(map(is_running, launchers)):
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


def is_running(process: psutil.Process) -> bool:
    """Return whether ``process`` runs. An ended one is a zombie until its parent has waited for it."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
