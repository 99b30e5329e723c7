"""Notice that a rank has died or cannot be reached, say so in one line, and let no rank wait for it.

A thread of each rank writes a beat now and then (:mod:`ds_dynmo.engine.comm.beats`), and reads that of the rank before
it: the ranks form a ring. A rank is *lost*

- if the backend fails on a rank, which asks: the processes that have ended on its host, or that were stopped, and the
  ranks elsewhere that write nothing while it looks, are lost;
- if it has written nothing for ``timeout_seconds``, for all of which another has been in one operation of the engine,
  or has waited outside of one (for a loss that is read, or the end of a save): its process was stopped, or the link to
  its host is cut. One that runs on the same host is just busy;
- or if an error has ended that operation there, and its process does not end.

Who finds that out writes the *verdict*, which every rank reads and the first of each host logs. A rank that is in an
operation raises :class:`RankLostError`, or ends if the backend keeps it; one that waits outside raises it. If the store
does not answer, rank 0's process has ended or cannot be reached, and every rank comes to this verdict by itself.

That a process has ended is no fault by itself: one stage is done with its last batch before another.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from deepspeed.utils import logger

from ds_dynmo.engine.comm.beats import Activity, Beat, Beats
from ds_dynmo.engine.comm.bounded import BoundedStore, CallThread
from ds_dynmo.engine.comm.hosts import identity
from ds_dynmo.engine.comm.posted import forget_posted
from ds_dynmo.errors import RankLostError
from ds_dynmo.torch_private import is_of_backend

LONGEST_PERIOD_SECONDS = 0.5  # between two beats
RESUME = "Resume the job from its last checkpoint"
OUT_OF_REACH = "ended or was stopped, or the link to its host is cut"
_AT_A_LOOK = 16  # ranks beside the watched ones: what all ranks read must stay far below what a store serves
_SURE_PERIODS = 3  # after which the thread of each rank has written, also on a busy machine


def grace_seconds(timeout_seconds: float) -> float:
    """Return how long the main thread may take to raise by itself, once there is a verdict."""
    return min(2.0, timeout_seconds / 4)


class Watch:
    """One rank's view of the other ranks of a world.

    Args:
        lookout: runs in a thread that this object starts, and ends with it.

    Attributes:
        end: stops the thread, before the world ends.
    """

    def __init__(self, lookout: Lookout) -> None:
        self._lookout = lookout
        lookout.introduce()
        thread = threading.Thread(target=lookout.run, name="ds_dynmo watch", daemon=True)
        thread.start()
        self.end = weakref.finalize(self, _end, lookout, thread)

    def come(self) -> int:
        """Note that this rank has come to the next collective over the world; return its number."""
        self._lookout.activity.collectives += 1
        return self._lookout.activity.collectives

    def missing(self, number: int, *, timed_out: bool) -> list[int]:
        """Return the ranks that had not come to a collective when the first rank had waited for too long.

        Args:
            number: of the collective.
            timed_out: whether this rank has waited for too long. Else another may have, and have closed its links.

        Raises:
            RuntimeError: the store does not answer, or no rank has waited for too long.
        """
        return self._lookout.missing(number, timed_out=timed_out)

    def say(self, verdict: str = "") -> str:
        """Log that ranks are lost, once on each host, and return it with a remedy.

        Args:
            verdict: "": the store of the launch does not answer.
        """
        self._lookout.verdict = verdict or self._lookout.of_lost_store()
        return self._lookout.say()

    def waiting(self, *, aside: bool = False) -> AbstractContextManager[None]:
        """Return a context in which this rank waits for others outside of an operation, in any thread.

        It has to call :meth:`check` now and then: unlike an operation, a wait does not end the process.

        Args:
            aside: not for the result of an operation.
        """
        return self._lookout.activity.lasting(aside=aside)

    def ending(self) -> AbstractContextManager[None]:
        """Return a context in which this process waits before it ends: it ends at once if a rank is lost."""
        return self._lookout.activity.doing("the end of the process")

    def check(self) -> None:
        """Refuse to begin an operation, or to wait, after a rank was lost.

        Raises:
            RankLostError: one was.
        """
        if self._lookout.verdict:
            raise RankLostError(self._lookout.say())

    def explain(self, error: Exception, *, ends_operation: bool = False) -> None:
        """Find out whether ``error`` came because a rank is lost.

        Args:
            ends_operation: then others learn of the error, if none is lost.

        Raises:
            RankLostError: one is.
        """
        with _undisturbed():
            message = self._lookout.find_out(error)
            if ends_operation and not message:
                self._lookout.note(error)
        if message and not isinstance(error, RankLostError):
            raise RankLostError(message) from error


class Lookout:
    """What the thread and the main thread of a rank share: see :class:`Watch`.

    Args:
        store: over a connection of its own, which no other thread keeps busy; keys belong to this object.
        timeout_seconds: of silence after which a rank is lost.
        remedy: says how to go on with the job.

    Attributes:
        activity: what this rank does.
        verdict: which ranks are lost; "": none, as far as this rank knows.
        ended: set when the world ends.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        world_size: int,
        *,
        timeout_seconds: float,
        activity: Activity,
        remedy: Callable[[], str],
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_seconds, self.activity, self._remedy = timeout_seconds, activity, remedy
        self._beats = Beats(store, rank, activity)
        self._period_seconds = min(LONGEST_PERIOD_SECONDS, timeout_seconds / 8)
        self._sure_seconds = _SURE_PERIODS * self._period_seconds
        self._heard_seconds = min(timeout_seconds / 2, 5.0)  # on a busy machine; ranks hear within two periods
        self._watched = {0, (rank - 1) % world_size} - {rank}
        self._before = [(rank - place) % world_size for place in range(1, world_size)]  # in the ring
        self._seen: dict[int, Beat] = {}
        self._changed_at: dict[int, float] = {}
        self._failed_at: dict[int, float] = {}
        self._lock, self._has_said, self._voice = threading.RLock(), False, Voice(store)
        self._message, self._hears_until = "", 0.0  # that the verdict was said by; until when others may hear it
        self._has_store = True  # after its connection has ended, torch logs a stack for each call
        self.verdict, self._num_lost = "", 1
        self.ended = threading.Event()

    # -- the thread -----------------------------------------------------------------------------------

    def introduce(self) -> None:
        """Write the first beat, so that others know this process."""
        if self._world_size > 1:
            with suppress(RuntimeError):  # the thread writes again
                self._beats.write()

    def run(self) -> None:
        """Write and read beats until the world ends, or a rank is lost while this one waits for others."""
        if self._world_size == 1:
            return
        answered_at = waits_from = time.monotonic()
        self._changed_at = dict.fromkeys(self._watched, answered_at)
        while not self.ended.wait(self._period_seconds):
            now = time.monotonic()
            if now - waits_from > self._timeout_seconds / 2:  # this process itself was stopped
                answered_at, self._changed_at = now, dict.fromkeys(self._changed_at, now)
            waits_too_long = self.activity.seconds_of_any_wait > self._timeout_seconds
            try:
                if self._has_store:
                    self._beats.write()
                    self._look(now, decides=waits_too_long)
                    answered_at = time.monotonic()
            except dist.DistNetworkError:
                self._has_store = False
            except RuntimeError:  # no answer in time
                pass
            if not (self._has_store or self.verdict) and self._voice.is_heard():
                self.verdict, self._has_said = self.of_lost_store(), True
            if waits_too_long and now - answered_at > self._timeout_seconds and not self._runs_first():
                self.verdict = self.verdict or self.of_lost_store()
            if self.verdict and not self.activity.is_idle:
                self._end_process()
                return
            waits_from = time.monotonic()

    def _look(self, now: float, *, decides: bool) -> None:
        """Read the beats of the watched ranks and the verdict, if there is one; or decide that silent ones are lost.

        Args:
            decides: whether this rank has waited for too long: then it watches all, as others may not be waiting, a
                few at a look.
        """
        watched = self._watched
        if decides:
            watched = watched.union(self._before[:_AT_A_LOOK])
            self._before = self._before[_AT_A_LOOK:] + self._before[:_AT_A_LOOK]
        beats = self._beats.read(watched)
        for rank in watched:
            self._changed_at.setdefault(rank, now)
            if rank in beats and self._seen.get(rank) != beats[rank]:
                self._seen[rank], self._changed_at[rank] = beats[rank], now
        kept = {rank: at for rank, at in self._failed_at.items() if rank not in beats}
        failed_at = {rank: self._failed_at.get(rank, now) for rank in beats if self.activity.waits_for(beats[rank])}
        self._failed_at = kept | failed_at
        if not self._has_read_verdict() and decides:
            misses_result = self.activity.seconds > self._timeout_seconds
            failed = {rank for rank, at in failed_at.items() if misses_result and now - at > self._sure_seconds}
            silent = {rank for rank in watched if now - self._changed_at[rank] > self._timeout_seconds}
            lost = {rank for rank in silent if rank not in self._seen or not self._seen[rank].is_at_work}
            if failed or lost:
                self._decide(failed or lost)

    def _end_process(self) -> None:
        """Say the verdict; then end this process, unless the main thread leaves its operation by itself."""
        self.say()
        until = time.monotonic() + grace_seconds(self._timeout_seconds)
        while not self.activity.is_idle:
            if time.monotonic() > until:
                for stream in (sys.stdout, sys.stderr):
                    with suppress(OSError, ValueError):
                        stream.flush()
                os._exit(1)
            if self.ended.wait(self._period_seconds / 4):
                return

    # -- verdicts -------------------------------------------------------------------------------------

    def find_out(self, error: Exception) -> str:
        """Say the verdict after an error of this rank, and return it; "": no rank is lost."""
        if self.ended.is_set() or not any(map(is_of_backend, causes(error))):
            return ""
        began = time.monotonic()
        while self._has_store and time.monotonic() - began < self._timeout_seconds:
            try:
                self._find_lost()
                return self.say() if self.verdict else ""
            except dist.DistNetworkError:
                self._has_store = False
            except RuntimeError:  # no answer in time, or at once after that
                self.ended.wait(self._period_seconds / 4)
        if not self.verdict and self._runs_first():
            return ""
        self.verdict = self.verdict or self.of_lost_store()
        return self.say()

    def note(self, error: Exception) -> None:
        """Let the others know by what error this rank has ended its operation, for which none is lost."""
        self.activity.failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        with suppress(RuntimeError):  # of the store
            self._beats.write()

    def _find_lost(self) -> None:
        """Look for ranks that have ended, or write nothing while this rank looks, until there is a verdict."""
        before, until = self._beats.read(self._others()), time.monotonic() + self._sure_seconds
        while not self._has_read_verdict():
            beats = self._beats.read(self._others())
            lost = {rank for rank, beat in beats.items() if beat.has_ended}
            if not lost and time.monotonic() > until:
                silent = {rank for rank in self._others() if beats.get(rank) == before.get(rank)}
                lost = {rank for rank in silent if rank not in beats or not beats[rank].is_at_work}
                if not lost:
                    return
            if lost:
                self._decide(lost)
            else:
                self.ended.wait(self._period_seconds / 4)

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self._world_size) if rank != self._rank)

    def _has_read_verdict(self) -> bool:
        """Read the verdict, once there is one, and say it at once: rank 0, whose process holds the store, may end."""
        with self._lock:
            if not self.verdict and self._store.check(["verdict"]):
                found = json.loads(self._store.get("verdict"))
                self.verdict, self._num_lost = found["text"], found["num_lost"]
                self._announce()
                self._store.add("heard", 1)
            return bool(self.verdict)

    def _decide(self, lost: set[int]) -> None:
        """Write the verdict that ranks are lost, unless another rank has, and read it."""
        beats = self._beats.read(sorted(lost))
        if beats and all(beat.has_ended for beat in beats.values()):
            what = "ended"
        elif beats and all(map(self.activity.waits_for, beats.values())):
            what = "failed, and its process has not ended"
        else:
            what = OUT_OF_REACH
        who = "; ".join(beats[rank].describe(rank) if rank in beats else f"rank {rank}" for rank in sorted(lost))
        self._store.set_first("verdict", json.dumps({"text": f"{who} has {what}", "num_lost": len(lost)}))
        self._has_read_verdict()

    def _runs_first(self) -> bool:
        """Return whether rank 0's process runs, as far as this one can tell: it may just be busy.

        One whose connections have ended is about to end.
        """
        return self._rank == 0 or (self._has_store and 0 in self._seen and self._seen[0].is_at_work)

    def of_lost_store(self) -> str:
        """Return the verdict where the launch's store, which rank 0's process holds, does not answer."""
        first = self._seen.get(0)
        who = "rank 0, with the store of the launch," if first is None else first.describe(0)
        has_ended = first is not None and first.has_ended
        return f"{who} has {'ended' if has_ended else OUT_OF_REACH}"

    def _remedy_in_time(self) -> str:
        """Return how to go on, for which files are read: on a host that may be out of reach, too."""
        try:
            found = CallThread("ds_dynmo remedy").run(self._remedy, grace_seconds(self._timeout_seconds))
        except Exception:  # the first error matters
            return RESUME
        return str(found)

    def say(self) -> str:
        """Log the verdict, once on each host, and return it with a remedy.

        On rank 0, wait until the others have said it: it holds the store.
        """
        message = self._announce()
        self._hears_until = self._hears_until or time.monotonic() + self._heard_seconds
        hear = self._world_size - self._num_lost
        with suppress(RuntimeError):
            while self._rank == 0 and time.monotonic() < self._hears_until and self._store.add("heard", 0) < hear:
                time.sleep(self._period_seconds / 4)
        return message

    def _announce(self) -> str:
        """Log the verdict, unless this host has, and return it with a remedy; nothing waits for what was posted."""
        forget_posted()
        with self._lock:
            if not self._message:
                self._message = f"{self.verdict}. {self._remedy_in_time()}"
                if not self._has_said and self._voice.say(self._message, has_store=self._has_store):
                    time.sleep(self._sure_seconds)  # threads of others on this host hear it
                self._has_said = True
            return self._message

    def missing(self, number: int, *, timed_out: bool) -> list[int]:
        """See :meth:`Watch.missing`."""
        self._beats.write()
        answer = f"missing/{number}"
        if timed_out and self._store.add(f"asked/{number}", 1) == 1:
            self.ended.wait(self._sure_seconds)
            beats = self._beats.read(range(self._world_size))
            come = {rank for rank, beat in beats.items() if beat.collectives >= number}
            self._store.set(answer, " ".join(str(rank) for rank in range(self._world_size) if rank not in come))
        self._store.wait([answer], timedelta(seconds=2 * self._sure_seconds))
        return [int(rank) for rank in self._store.get(answer).decode().split()]


class Voice:
    """Logs a line once on each host.

    The rank that is first in the store does. It holds a name of the host as well, as the store may cease to answer.

    Args:
        store: whose keys belong to the line.
    """

    def __init__(self, store: BoundedStore) -> None:
        self._store = store
        launch = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
        self._name = f"\0ds_dynmo {' '.join(launch) if all(launch) else os.getppid()}"
        self._held: socket.socket | None = None

    def say(self, line: str, *, has_store: bool = True) -> bool:
        """Log it, unless a rank of this host has; without the store, one whose process still runs.

        Returns:
            Whether this process has to stay for a while, as others cannot ask the store.
        """
        by_store = False
        if has_store:
            with suppress(RuntimeError):
                if self._store.add(f"said/{identity()}", 1) > 1:
                    return False
                by_store = True
        if self._is_taken():
            return False
        logger.error(line)
        return not by_store

    def is_heard(self) -> bool:
        """Return whether a rank of this host, whose process still runs, has logged it."""
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asks:
            asks.connect(self._name)
            return True
        return False

    def _is_taken(self) -> bool:
        """Return whether another process of this host has the name. Else this one has it for as long as it runs."""
        try:
            self._held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._held.bind(self._name)
        except OSError as error:  # where there are no such names, none is taken
            return error.errno == errno.EADDRINUSE
        return False


class TracebackOfOthers:
    """Print the traceback of an error that ends the process, unless it is a lost rank's, which is logged in one line.

    Args:
        before: what prints other errors.
    """

    def __init__(self, before: Callable[..., None]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print it, or nothing."""
        if not issubclass(kind, RankLostError):
            self._before(kind, error, trace)

    @classmethod
    def install(cls) -> None:
        """Let Python call this for errors that end the process."""
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls(sys.excepthook)


def _end(lookout: Lookout, thread: threading.Thread) -> None:
    """Stop the thread: at the end of the process none may be in a call of the store."""
    lookout.ended.set()
    if thread is not threading.current_thread():
        thread.join(LONGEST_PERIOD_SECONDS)


def causes(error: BaseException | None) -> list[BaseException]:
    """List an error and those that it came from, each once: an error that is raised again may come from itself."""
    found: list[BaseException] = []
    while error is not None and not any(error is other for other in found):
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay SIGTERM, by which a launcher ends its other ranks as soon as one has ended."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), signal.SIGTERM)
