"""Agreement of the ranks through the launch's store, for threads that run beside training.

Collectives belong to the main thread: two threads of a rank would mix up theirs. The store's keys do not, and a rank
that trains on does not notice who waits for them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from ds_dynmo.engine.comm.attendance import Attendance
from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.engine.comm.watch import Watch
from ds_dynmo.errors import CheckpointError, RankLostError

_LONGEST_PAUSE_SECONDS = 0.25  # between two looks for a key

Result = TypeVar("Result")


class Agreement(Protocol):
    """A way by which the ranks agree that each has done its part."""

    def everywhere(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on every rank; return its result once it has returned on all.

        Raises:
            CheckpointError: on every rank, if any rank's ``function`` raised.
        """
        ...


class StoreAgreement:
    """Agreement of one thread of each rank.

    In each round, a rank that has done its part counts itself. The last of all, or the first that has waited too long,
    writes the verdict. A rank has a key only if it failed. So a round costs every rank a few operations.

    Args:
        store: its keys belong to this object.
        timeout_seconds: that a rank waits for others when it has done its part.
        watch: notices that a rank is lost: then this one waits no longer.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        watch: Watch,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_seconds, self._watch = timeout_seconds, watch
        self._round = 0

    def everywhere(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on every rank: :meth:`Agreement.everywhere`.

        Raises:
            CheckpointError: on every rank, if any rank's ``function`` raised or a rank is missing; on this rank alone,
                if the store does not answer it.
        """
        failure = ""
        try:
            result = function()
        except CheckpointError as error:
            failure = str(error)
        except Exception as error:  # other ranks have to know
            failure = f"{type(error).__name__}: {error}"
        try:
            self._arrive(failure)
            with self._watch.waiting(aside=True):
                verdict = self._wait_for_verdict()
        except RankLostError as error:  # which has been said
            raise CheckpointError(f"rank {self._rank}: a rank is lost") from error
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self._rank}: it is not known whether other ranks did their part: {error}"
            ) from error
        if verdict:
            raise CheckpointError(verdict)
        return result

    def close(self) -> None:
        """Let rank 0, which has the store, wait until the others have read the last verdict. Every rank calls this."""
        with suppress(RuntimeError):  # ranks that are gone read nothing
            self._arrive("")
            if self._rank == 0:
                with self._watch.waiting(aside=True):
                    self._wait_for_verdict()
                self._delete(self._round)

    def _arrive(self, failure: str) -> None:
        """Say that this rank has done its part of the next round."""
        self._round += 1
        if failure:
            number = self._store.add(self._key("failures"), 1)
            self._store.set(self._key(f"failure/{number}"), json.dumps([self._rank, failure]))
        if self._attendance(self._round).come(self._rank):
            if self._round > 1:  # every rank has read its verdict
                self._delete(self._round - 1)
            self._decide(self._first_failure())

    def _wait_for_verdict(self) -> str:
        """Return the first failure by rank, or which ranks are missing; "" if all have done their part.

        It looks again and again: a wait in the store would keep the main thread from it.

        Raises:
            RuntimeError: a rank is lost, or the store does not answer.
        """
        deadline, pause_seconds, key = time.monotonic() + self._timeout_seconds, 0.001, self._key("verdict")
        while not self._store.check([key]):
            self._watch.check()
            if time.monotonic() > deadline:
                if missing := self._attendance(self._round).missing():
                    self._decide(
                        f"ranks {missing} have not done their part {self._timeout_seconds:g} s after rank {self._rank}"
                    )
                break
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        return self._store.get(key).decode()  # it waits for another rank that is just writing it

    def _decide(self, verdict: str) -> None:
        """Write the verdict, unless another rank does: one may come last just when another stops to wait."""
        if self._store.add(self._key("verdicts"), 1) == 1:
            self._store.set(self._key("verdict"), verdict)

    def _first_failure(self) -> str:
        count = self._store.add(self._key("failures"), 0)
        failures = [json.loads(self._store.get(self._key(f"failure/{number}"))) for number in range(1, count + 1)]
        if not failures:
            return ""
        rank, failure = min(failures)
        return f"rank {rank}: {failure}"

    def _attendance(self, number: int) -> Attendance:
        return Attendance(self._store, self._key("done", number), self._world_size)

    def _delete(self, number: int) -> None:
        failures = range(1, self._store.add(self._key("failures", number), 0) + 1)
        names = ["failures", "verdicts", "verdict", *(f"failure/{failure}" for failure in failures)]
        self._store.delete([self._key(name, number) for name in names])
        self._attendance(number).forget()

    def _key(self, name: str, number: int | None = None) -> str:
        return f"{self._round if number is None else number}/{name}"
