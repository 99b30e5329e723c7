"""Names of the ranks that did not come to a collective over the world.

While all come, the store of the launch is asked for nothing. A thread of each rank writes now and then which collective
the rank has got to, if that has changed. A rank that has waited for others in vain reads what the ranks wrote, and
writes the missing ones down, so that all name the same.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from datetime import timedelta

from ds_dynmo.engine.comm.bounded import BoundedStore

PERIOD_SECONDS = 0.5  # between two looks of the thread
_SURE_SECONDS = 3 * PERIOD_SECONDS  # after which the thread of each rank has looked, also on a busy machine


class _Progress:
    """The number of the last collective that this rank has come to, and the last one that it has written."""

    number = written = 0


class RollCall:
    """One rank's part in the calls.

    Args:
        store: whose keys belong to this object.
    """

    def __init__(self, store: BoundedStore, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._progress, ended = _Progress(), threading.Event()
        arguments = (store, rank, self._progress, ended)
        threading.Thread(target=_write_now_and_then, args=arguments, name="ds_dynmo roll call", daemon=True).start()
        weakref.finalize(self, ended.set)

    def come(self) -> int:
        """Note that this rank has come to the next collective; return its number."""
        self._progress.number += 1
        return self._progress.number

    def missing(self, number: int, *, timed_out: bool) -> list[int]:
        """Return the ranks that had not come to a collective when the first rank had waited for too long.

        Args:
            number: of the collective.
            timed_out: whether this rank has waited for too long. Else another may have, and have closed its links.

        Raises:
            RuntimeError: the store does not answer, or no rank has waited for too long.
        """
        _write(self._store, self._rank, self._progress)
        answer = f"missing/{number}"
        if timed_out and self._store.add(f"asked/{number}", 1) == 1:
            threading.Event().wait(_SURE_SECONDS)
            missing = [rank for rank in range(self._world_size) if self._reached(rank) < number]
            self._store.set(answer, " ".join(map(str, missing)))
        self._store.wait([answer], timedelta(seconds=2 * _SURE_SECONDS))
        return [int(rank) for rank in self._store.get(answer).decode().split()]

    def _reached(self, rank: int) -> int:
        key = str(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _write_now_and_then(store: BoundedStore, rank: int, progress: _Progress, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # it only names missing ranks; a collective fails by itself
        while not ended.wait(PERIOD_SECONDS):
            if progress.written != progress.number:
                _write(store, rank, progress)


def _write(store: BoundedStore, rank: int, progress: _Progress) -> None:
    number = progress.number
    store.set(str(rank), str(number))
    progress.written = number
