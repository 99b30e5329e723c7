"""Let one process at a time save into a folder: it claims the folder by a file there, locked for as long as it lives.

The kernel frees the lock when the process ends, however it ends. The file stays and says which process claimed last. So
a process whose claim was taken over notices it in its next save, also where no lock of another machine is seen: what is
written there is not of this process, and the file is locked, be it by this process.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_dynmo.errors import CheckpointError, ConfigError

__all__ = ["CLAIM", "Process", "check_claim", "claim_folder", "missing_folders"]

CLAIM = ".dynmo-run"


@dataclass(frozen=True)
class Process:
    """A process that no other one is equal to.

    Attributes:
        boot: of the host, another one each time that it boots.
        started: ticks from then until the process began; its number may have been another's.
    """

    host: str
    boot: str
    number: int
    started: int

    @classmethod
    def this(cls) -> Process:
        """Describe the running process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return cls(socket.gethostname(), boot, os.getpid(), int(fields[19]))

    def __str__(self) -> str:
        return f"process {self.number} on {self.host}"


@contextmanager
def claim_folder(folder: str | os.PathLike[str], *, take_over: bool = False) -> Iterator[None]:
    """Claim a folder of checkpoints for this process while the body runs; make it if it is not there.

    Call it on rank 0: ``engine.save_checkpoint`` into the folder is then refused to all other processes. A folder that
    was made and into which nothing was saved is removed again.

    Args:
        take_over: claim it also from a process that runs, whose next save is then refused.

    Raises:
        ConfigError: a process that runs has claimed it.
        OSError: it cannot be written to.
    """
    made = missing_folders(folder)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, CLAIM)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if not _lock(descriptor) and not take_over:
        os.close(descriptor)
        raise ConfigError(f"{folder}: {_read(path) or 'another process'} saves there now")
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(Process.this())).encode(), 0)
        yield
    finally:
        if _read(path) == Process.this() and os.listdir(folder) == [CLAIM]:
            os.unlink(path)
            for empty in made:
                with suppress(OSError):  # another process writes there by now
                    os.rmdir(empty)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile would keep it
        os.close(descriptor)


def check_claim(folder: str) -> None:
    """Refuse to save into a folder that another process has claimed which may still run.

    Raises:
        CheckpointError: naming it.
    """
    path = os.path.join(folder, CLAIM)
    claimant = _read(path)
    if claimant is None or claimant == Process.this():
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            if _lock(descriptor, unknown=False):
                return
        finally:
            os.close(descriptor)
    raise CheckpointError(f"{folder}: {claimant} has claimed it, so this process saves nothing there")


def missing_folders(path: str | os.PathLike[str]) -> list[str]:
    """List a folder and those above it that are not there, the innermost first."""
    missing = []
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def _lock(descriptor: int, *, unknown: bool = True) -> bool:
    """Lock an open file; return whether it is locked for it now, ``unknown`` where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return unknown
    return True


def _read(path: str) -> Process | None:
    """Read which process wrote a claim; None: there is none, or it is being written."""
    try:
        return Process(**json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError):
        return None
