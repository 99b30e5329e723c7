"""Agreement of the ranks through the launch's store, for threads that run beside training.

Collectives belong to the main thread: two threads of a rank would mix up theirs. The store's keys do not, and a rank
that trains on does not notice who waits for them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.errors import CheckpointError

_LONGEST_PAUSE_SECONDS = 0.25  # between two looks for a key
_VERDICT = "verdict"


class Agreement(Protocol):
    """A way by which the ranks agree that each has done its part."""

    def gather(self, function: Callable[[], Any]) -> list[Any]:
        """Call ``function`` on every rank; return the results in rank order on rank 0, an empty list elsewhere.

        Raises:
            CheckpointError: on every rank, if any rank's ``function`` raised.
        """


class StoreAgreement:
    """Agreement of one thread of each rank. Results are plain JSON.

    Rank 0 collects what the others write, and writes the verdict. It deletes the keys of a round when all ranks have
    begun the next.

    Args:
        store: its keys belong to this object.
        timeout_seconds: that a rank waits for others when it has done its part.
    """

    def __init__(self, store: BoundedStore, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_seconds = timeout_seconds
        self._round = 0

    def gather(self, function: Callable[[], Any]) -> list[Any]:
        """Call ``function`` on every rank: :meth:`Agreement.gather`.

        Raises:
            CheckpointError: on every rank, if any rank's ``function`` raised or a rank is missing; on this rank alone,
                if the store does not answer it.
        """
        failure = result = None
        try:
            result = function()
        except CheckpointError as error:
            failure = str(error)
        except Exception as error:  # other ranks have to know
            failure = f"{type(error).__name__}: {error}"
        try:
            results, problem = self._exchange(failure, result)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self._rank}: it is not known whether other ranks did their part: {error}"
            ) from error
        if problem:
            raise CheckpointError(problem)
        return results

    def close(self) -> None:
        """Let rank 0 wait until the others have read the last verdict, and delete the keys. Every rank calls this."""
        self._round += 1
        with suppress(RuntimeError):  # ranks that are gone read nothing
            if self._rank != 0:
                self._store.set(self._key(self._rank), "")
                return
            self._collect()
            self._delete(self._round - 1)
            self._delete(self._round)

    def _exchange(self, failure: str | None, result: Any) -> tuple[list[Any], str]:
        """Return every rank's result on rank 0, and the first problem by rank.

        Raises:
            RuntimeError: the store does not answer, or rank 0 writes no verdict.
        """
        self._round += 1
        mine = json.dumps([failure, result])
        if self._rank != 0:
            self._store.set(self._key(self._rank), mine)
            verdict = self._read(_VERDICT, time.monotonic() + 2 * self._timeout_seconds)  # rank 0 waits for others too
            if verdict is None:
                raise RuntimeError(f"rank 0 has not said so within {2 * self._timeout_seconds:g} s")
            return [], verdict
        texts = [mine, *self._collect()]
        if self._round > 1:
            self._delete(self._round - 1)
        missing = f"has not done its part {self._timeout_seconds:g} s after rank 0"
        outcomes = [json.loads(text) if text is not None else [missing, None] for text in texts]
        problems = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(outcomes) if problem is not None]
        verdict = problems[0] if problems else ""
        self._store.set(self._key(_VERDICT), verdict)
        return [result for _, result in outcomes], verdict

    def _collect(self) -> list[str | None]:
        """Read what the other ranks wrote in this round; None: a rank did not within the time-out."""
        deadline = time.monotonic() + self._timeout_seconds
        return [self._read(rank, deadline) for rank in range(1, self._world_size)]

    def _read(self, name: int | str, deadline: float) -> str | None:
        """Wait for a key. Look again and again: a wait in the store would keep the main thread from it."""
        key, pause_seconds = self._key(name), 0.001
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        return self._store.get(key).decode()

    def _delete(self, number: int) -> None:
        names = [*range(1, self._world_size), _VERDICT]
        self._store.delete([self._key(name, number) for name in names])

    def _key(self, name: int | str, number: int | None = None) -> str:
        return f"{self._round if number is None else number}/{name}"
