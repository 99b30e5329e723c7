"""Follow the lines that another process adds to a file, which may appear late, be truncated or be replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

KEPT_BYTES = 4096  # of what was read last, to tell whether the file still has it


class Follower:
    """Passes on each line of a file once, when all of it is there.

    The file is opened anew for every look: the path counts, not the file that was there before.

    Attributes:
        problem: why the file could not be read in the latest look; None: it could.
        changed: seconds since the epoch when the file was last written; None before it was seen.

    Args:
        add: takes a line, without the bytes of one that is still being written.
        restart: is called before the first line of a file that no longer begins with what was read.
    """

    def __init__(self, path: Path, add: Callable[[bytes], None], restart: Callable[[], None]) -> None:
        self.problem: str | None = None
        self.changed: float | None = None
        self._path, self._add, self._restart = path, add, restart
        self._offset = 0
        self._kept = b""  # the last bytes before the offset

    def look(self) -> None:
        """Pass on the lines that are new."""
        try:
            if not stat.S_ISREG(self._path.stat().st_mode):  # opening a pipe would wait for a writer
                raise OSError("is not a file")
            self._read()
            self.problem = None
        except FileNotFoundError:
            self.problem = "is not there yet" if self.changed is None else "is gone"
        except OSError as error:
            self.problem = f"cannot be read: {error.strerror or error}"

    @property
    def waits(self) -> bool:
        """Whether the file can be read, or may still appear."""
        return self.problem in (None, "is not there yet", "is gone")

    def _read(self) -> None:
        with self._path.open("rb") as file:
            self.changed = os.fstat(file.fileno()).st_mtime
            file.seek(self._offset - len(self._kept))
            if file.read(len(self._kept)) != self._kept:
                self._offset, self._kept = 0, b""
                self._restart()
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._kept = (self._kept + line)[-KEPT_BYTES:]
                self._add(line)
