"""Run one of our commands, and find what it leaves: processes, shared memory, locks, files and folders."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from guard import guarded_group

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
MARK = "DS_DYNMO_WATCHED"
PATIENCE_SECONDS = 120.0
TORCHS_CACHE = "/torchinductor_"  # an empty folder, unless scripts/setup_env.sh gave torch another
OF_LAUNCHERS = (TORCHS_CACHE, "/torchelastic_")  # what torchrun leaves, too
Found = TypeVar("Found")


class WatchedCommand:
    """A command in its own session, with its own home, temporary folder and folder of torch's extensions.

    The extensions hold the lock of a job that was killed while it compiled DeepSpeed's shared-memory operator, so a
    process that loads that operator waits forever. Processes are recognised by a variable of their environment.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self._mark = uuid.uuid4().hex
        home, extensions = folder / "home", folder / "extensions"
        self._temporary = temporary = Path(tempfile.mkdtemp())  # for sockets, whose paths must be short
        self._folders = [home, temporary, extensions]
        home.mkdir()
        lock = extensions / "deepspeed_shm_comm" / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        self._held = socket.socket()  # until the end, so that no program but the command gets the port
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self._port = self._held.getsockname()[1]
        self._before = self._lasting()
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        environment = {
            **kept,
            MARK: self._mark,
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "TORCH_EXTENSIONS_DIR": str(extensions),
            "MASTER_PORT": str(self._port),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
        }
        self._output = folder / "output"
        with self._output.open("w") as output:
            self.launcher = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, text=True, start_new_session=True
            )
        self._guard = guarded_group(self.launcher)

    def __enter__(self) -> WatchedCommand:
        self._guard.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.__exit__(None, None, None)
        self._held.close()
        shutil.rmtree(self._temporary, ignore_errors=True)  # what a test lets stay there

    def processes(self, part: str = "") -> list[psutil.Process]:
        """Return the running processes with ``part`` in their command line."""
        return [process for process, line in self._running() if part in line]

    def until(self, look: Callable[[], Found]) -> Found:
        """Wait until ``look`` finds something, and return it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := look()):
            assert time.monotonic() < deadline and self.launcher.poll() is None, self._output.read_text()
            time.sleep(0.05)
        return found

    def left(self, *besides: str) -> list[str]:
        """Return what is left after the launcher has ended, as soon as nothing is, or at the deadline.

        Args:
            besides: parts of paths that may stay.
        """
        self.launcher.wait(PATIENCE_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while left := [path for path in self._left() if not any(part in path for part in besides)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return left

    def output(self) -> str:
        return self._output.read_text()

    def _left(self) -> list[str]:
        running = [line for _, line in self._running()]
        return [*running, *sorted(self._lasting() - self._before)]

    def _running(self) -> list[tuple[psutil.Process, str]]:
        """Return the running processes with their command lines. They may end at any moment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and (line := " ".join(process.cmdline())):
                    found.append((process, line))
        return found

    def _lasting(self) -> set[str]:
        """Return shared memory and files. Of DeepSpeed's shared memory only that of the command's port counts."""
        files = [path for folder in self._folders for path in folder.rglob("*")]
        shared = [
            path
            for path in SHARED_MEMORY.iterdir()
            if not path.name.startswith("deepspeed_") or f"_{self._port}_" in path.name
        ]
        return set(map(str, files + shared))
