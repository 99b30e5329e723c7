"""What a round leaves behind: processes, shared memory, temporary files, and parts of checkpoints."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
PATIENCE_SECONDS = 10.0  # a killed process takes a moment to go


@dataclass(frozen=True)
class Surroundings:
    """What there was before a round."""

    processes: frozenset[psutil.Process]
    files: frozenset[Path]

    @classmethod
    def now(cls) -> Surroundings:
        """Look at this program's processes, its temporary folder, and the machine's shared memory."""
        return cls(
            frozenset(psutil.Process().children(recursive=True)),
            frozenset([*SHARED_MEMORY.iterdir(), *Path(tempfile.gettempdir()).iterdir()]),
        )

    def left(self) -> list[str]:
        """List what there is beyond that, as soon as there is nothing, or when patience ends."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := self._more()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _more(self) -> list[str]:
        now = Surroundings.now()
        processes = [str(process) for process in now.processes - self.processes]
        files = now.files - self.files
        used = _used_by_others() if files else set()
        return processes + sorted(str(path) for path in files if str(path) not in used)


def _used_by_others() -> set[str]:
    """List the shared memory that processes have open or mapped: other programs run on this machine, too."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            found.update(each.path for each in process.memory_maps() if each.path.startswith(str(SHARED_MEMORY)))
            found.update(os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir())
    return found


def parts_of_checkpoints(folder: Path) -> list[str]:
    """List what is in a folder of checkpoints beside whole ones and the name of the last, after a save."""
    if not folder.exists():
        return []
    return [str(path) for path in folder.iterdir() if path.name != "latest" and path.name.startswith(".")]
