"""End ranks when a launcher above them has died.

The ``deepspeed`` command starts a launcher on each node, which starts the ranks. If either is killed with SIGKILL, the
processes that it started go on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import dropwhile

import psutil  # comes with DeepSpeed

POLL_SECONDS = 1.0
GRACE_SECONDS = 30.0  # to end after SIGTERM, as DeepSpeed's launcher gives
WATCHING = "end with launcher"  # name of the thread
NODE_LAUNCHER = "deepspeed.launcher.launch"


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
    found = []
    parent = rank.parent()
    while program and parent is not None and _program_of(parent, len(program)) == program:
        found.append(parent)
        parent = parent.parent()
    return found


def _program(command_line: Sequence[str]) -> list[str]:
    """Give the program that an interpreter runs, with its arguments, without those that DeepSpeed's launcher adds."""
    given = dropwhile(lambda word: word.startswith("-"), command_line[1:])
    return [word for word in given if not word.startswith("--local_rank=")]


def _program_of(launcher: psutil.Process, words: int) -> list[str]:
    """Give the program that a launcher would start, if that and its arguments are so many words."""
    return _by_name(_command_line(launcher)[-words:])


def _by_name(program: Sequence[str]) -> list[str]:
    """Leave out the folder of a program, which a launcher may have found on its path."""
    return [os.path.basename(word) if number == 0 else word for number, word in enumerate(program)]


def _command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _has_lost_launcher(top: psutil.Process) -> bool:
    """Tell whether the process that started ``top`` has died already.

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
    """Tell whether the parent of ``process`` has died: an orphan's parent is in another session."""
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
    """Tell whether ``process`` runs. One that has ended is a zombie until its parent has waited for it."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
