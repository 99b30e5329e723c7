"""Files that rank 0 writes alone: refused on every rank at the start, and no end of training later."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.errors import ConfigError

Warn = Callable[[str], None]


def check_writable(path: str | None, key: str, comm: Communicator, *, writes: bool) -> None:
    """Make the folder of ``path`` on the rank that ``writes``, rank 0, and see that the file opens. Collective.

    Args:
        path: rank 0's counts; None: it writes none. Others may have another one.
        key: of the configuration, for the error.

    Raises:
        ConfigError: on every rank, where rank 0 cannot write the file.
    """
    failure = None
    if writes and path is not None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).open("a").close()
        except OSError as error:
            failure = f'{key} = "{path}": cannot be written: {error}'
    comm.enter("initialize")
    failure = comm.broadcast_object(failure)
    if failure is not None:
        raise ConfigError(failure)


class WarnsOnce:
    """Call ``write`` and go on where it fails; the first failure is warned of.

    The other ranks would wait for one that raises alone.

    Args:
        what: is written, for the warning.
        errors: that ``write`` may raise.
    """

    def __init__(
        self, what: str, write: Callable[[Any], None], warn: Warn, errors: type[Exception] = Exception
    ) -> None:
        self._what, self._write, self._warn, self._errors = what, write, warn, errors
        self._warned = False

    def __call__(self, content: Any) -> None:
        try:
            self._write(content)
        except self._errors as error:
            if not self._warned:
                self._warn(
                    f"{self._what}: was not written: {error}. Training goes on; what comes later is tried, and no "
                    "failure is warned of again"
                )
            self._warned = True


def record_writer(path: Path, warn: Warn) -> Callable[[dict[str, Any]], None]:
    """A function that appends a record to a file of JSON lines, or warns once that it cannot."""
    return WarnsOnce(str(path), lambda record: append_line(path, json.dumps(record)), warn, OSError)


def append_line(path: Path, line: str) -> None:
    """Write a whole line, or none of it.

    Raises:
        OSError: it could not be written.
    """
    with path.open("ab", buffering=0) as file:
        begin = file.seek(0, os.SEEK_END) if file.seekable() else 0  # a pipe or a terminal is not
        left = (line + "\n").encode()
        try:
            while left:
                left = left[file.write(left) or 0 :]
        except OSError:
            with suppress(OSError):  # a device
                file.truncate(begin)
            raise


def guard_monitors(master: Any, warn: Warn) -> None:
    """Let no monitor of DeepSpeed's end training on rank 0 alone, nor keep the others from what is theirs.

    Args:
        master: DeepSpeed's ``MonitorMaster``. What DeepSpeed itself sends goes through it too.
    """
    for name in ("tb_monitor", "wandb_monitor", "csv_monitor", "comet_monitor"):  # read in DeepSpeed 0.19.8
        monitor = getattr(master, name, None)
        if monitor is not None:
            monitor.write_events = WarnsOnce(name, monitor.write_events, warn)
