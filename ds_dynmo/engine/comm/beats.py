"""What each rank writes of itself into the launch's store, now and then: that it runs, and what it does."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache

import psutil  # comes with DeepSpeed

from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.engine.comm.hosts import identity
from ds_dynmo.launch import is_running


class Activity:
    """What this rank does for the engine: operations, phases of them, and waits for other ranks. Threads share it.

    Attributes:
        collectives: the number of collectives over the world that this rank has come to.
        operation: the name of the last one that it has begun.
        attempt: the number of times in a row that it has.
        failure: the error that ended the last operation; "": none did.
    """

    def __init__(self) -> None:
        self.collectives = 0
        self.operation, self.attempt = "initialize", 1
        self.failure = ""
        self._under_way: list[list[str]] = []
        self._began: list[float] = []  # when the present operation did, and waits for the result of one
        self._began_aside: list[float] = []  # when waits did that belong to no operation

    @property
    def is_idle(self) -> bool:
        """Whether code of the user runs, outside of any operation."""
        return not self._under_way

    @property
    def seconds(self) -> float:
        """Since when it is in its present operation, or waits for the result of one; 0.0: neither."""
        now = time.monotonic()
        return now - min(self._began, default=now)

    @property
    def seconds_of_any_wait(self) -> float:
        """Like :attr:`seconds`, or since when it waits for others aside; 0.0: it does nothing of all this."""
        now = time.monotonic()
        return max(self.seconds, now - min(self._began_aside, default=now))

    def waits_for(self, beat: Beat) -> bool:
        """Return whether an error ended on the beat's rank what this one is in, or waits for the result of."""
        is_same = (beat.operation, beat.attempt) == (self.operation, self.attempt)
        return is_same and bool(beat.failure) and bool(self._began)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Name an operation, such as "batch 12", or a phase of one. A phase may end after the next has begun."""
        is_phase = not self.is_idle
        if not is_phase:
            self.failure = ""
            self.attempt = self.attempt + 1 if what == self.operation else 1
            self.operation = what
        entry = [what]
        self._under_way.append(entry)
        try:
            with nullcontext() if is_phase else self.lasting():
                yield
        finally:
            self._under_way = [other for other in self._under_way if other is not entry]

    @contextmanager
    def lasting(self, *, aside: bool = False) -> Iterator[None]:
        """Note since when an operation, or a wait for other ranks outside of one, lasts; that may be in any thread.

        Args:
            aside: others may be late without a fault: a save goes on beside operations.
        """
        began, entries = time.monotonic(), self._began_aside if aside else self._began
        entries.append(began)
        try:
            yield
        finally:
            entries.remove(began)

    def __str__(self) -> str:
        names = [what for (what,) in self._under_way]
        if names:
            return f"in {': '.join(dict.fromkeys((names[0], names[-1])))}"
        return f"after {self.operation}" + (", waiting for other ranks" if self._began or self._began_aside else "")


@dataclass(frozen=True)
class Beat:
    """An entry of a rank.

    Attributes:
        count: of its entries.
        collectives, operation, attempt, failure: see :class:`Activity`.
        doing: says what the rank does.
        host: the name of its host.
        processes: identifies the processes that it sees: a pid means the same to ranks that see the same.
        pid: of its process.
        launch_rank: its number at the launch.
    """

    count: int
    collectives: int
    operation: str
    attempt: int
    doing: str
    failure: str
    host: str
    processes: str
    pid: int
    launch_rank: str

    @property
    def is_seen(self) -> bool:
        """Whether this process can tell if that of the beat runs."""
        return self.processes == _processes()

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended, as far as this process can tell."""
        return self.is_seen and not _runs(self.pid)

    @property
    def is_at_work(self) -> bool:
        """Whether its process runs and was not stopped, as far as this process can tell: it may just be busy."""
        return self.is_seen and _runs(self.pid, unless=psutil.STATUS_STOPPED)

    def describe(self, rank: int) -> str:
        """Say which rank it is, by its number in the present world, where, and what it did."""
        number = (
            f"rank {rank}" if self.launch_rank in ("", str(rank)) else f"rank {rank}, {self.launch_rank} at the launch"
        )
        why = f", {self.failure}" if self.failure else ""
        return f"{number} (host {self.host}, process {self.pid}, {self.doing}{why})"


class Beats:
    """The entries of all ranks of a world, a key for each.

    Args:
        store: whose keys belong to this object.
    """

    def __init__(self, store: BoundedStore, rank: int, activity: Activity) -> None:
        self._store, self._rank, self._activity = store, rank, activity
        self._count = 0

    def write(self) -> None:
        """Write this rank's entry."""
        self._count += 1
        now = self._activity
        beat = Beat(
            count=self._count,
            collectives=now.collectives,
            operation=now.operation,
            attempt=now.attempt,
            doing=str(now),
            failure=now.failure,
            host=socket.gethostname(),
            processes=_processes(),
            pid=os.getpid(),
            launch_rank=os.environ.get("RANK", ""),
        )
        self._store.set(_key(self._rank), json.dumps(asdict(beat)))

    def read(self, ranks: Iterable[int]) -> dict[int, Beat]:
        """Read the entries of ``ranks``. Those that have not written one are left out."""
        there = list(ranks)
        if not self._store.check([*map(_key, there)]):
            there = [rank for rank in there if self._store.check([_key(rank)])]
        values = self._store.multi_get([*map(_key, there)]) if there else []
        return {rank: Beat(**json.loads(value)) for rank, value in zip(there, values, strict=True)}


def _key(rank: int) -> str:
    return f"beat/{rank}"


@cache
def _processes() -> str:
    """Identify the processes that this one sees: those of its host, or of its container."""
    try:
        return f"{identity()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return identity()


def _runs(pid: int, unless: str = "") -> bool:
    try:
        process = psutil.Process(pid)
        return is_running(process) and process.status() != unless
    except psutil.Error:
        return False
