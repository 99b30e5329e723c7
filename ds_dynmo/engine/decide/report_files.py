"""Files that only rank 0 writes.

If rank 0 cannot write one at the start, all ranks refuse to start. A later failure does not end training.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.errors import ConfigError, reason_of
from ds_dynmo.files import append_line

Warn = Callable[[str], None]


def check_writable(path: str | None, key: str, comm: Communicator, *, writes: bool) -> None:
    """Create the folder of ``path`` on rank 0, and check that the file opens. Collective.

    Args:
        path: used on rank 0 only; None: there is no such file.
        key: of the configuration, for the error.
        writes: whether this is rank 0.

    Raises:
        ConfigError: on every rank, if rank 0 cannot write the file.
    """
    failure = None
    if writes and path is not None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).open("a").close()
        except OSError as error:
            failure = f'{key} = "{path}": cannot be written: {reason_of(error)}'
    comm.enter("initialize")
    failure = comm.broadcast_object(failure)
    if failure is not None:
        raise ConfigError(failure)


class WarnsOnce:
    """Calls ``write``, and warns of its first failure instead of raising, as other ranks would wait for this one.

    Args:
        what: name of the file or monitor in the warning.
        errors: errors of ``write`` that are caught.
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
                    f"{self._what}: was not written: {error}. Training continues; later writes are tried, without "
                    "further warnings"
                )
            self._warned = True


def record_writer(path: Path, warn: Warn) -> Callable[[dict[str, Any]], None]:
    """Return a function that appends a record to a file of JSON lines, or warns once that it cannot."""
    return WarnsOnce(str(path), lambda record: append_line(path, json.dumps(record)), warn, OSError)


def guard_monitors(master: Any, warn: Warn) -> None:
    """Let every DeepSpeed monitor warn instead of raise: a failure must not end training or stop other monitors.

    Args:
        master: DeepSpeed's ``MonitorMaster``, which DeepSpeed's events use too.
    """
    for name in ("tb_monitor", "wandb_monitor", "csv_monitor", "comet_monitor"):  # read in DeepSpeed 0.19.8
        monitor = getattr(master, name, None)
        if monitor is not None:
            monitor.write_events = WarnsOnce(name, monitor.write_events, warn)
