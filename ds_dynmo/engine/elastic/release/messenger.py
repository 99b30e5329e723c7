"""Calls a release policy beside the training, again and again where it is refused, and reports a refusal once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ds_dynmo.engine.elastic.release.policy import Place, ReleasePolicy, ReleaseRefused

_FIRST_PAUSE_SECONDS = 1.0  # doubled after each refusal


class Messenger:
    """One per job, on rank 0. A later release takes the place of one that is still being tried.

    Args:
        warn, inform: report a line, of a refusal and of what was done.
        attempts: how often a release is tried.
        pause: waits so many seconds, or less where the event is set; for tests.
    """

    def __init__(
        self,
        policy: ReleasePolicy,
        warn: Callable[[str], None],
        inform: Callable[[str], None],
        *,
        attempts: int,
        pause: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._policy, self._attempts, self._pause = policy, attempts, pause
        self._warn, self._inform = warn, inform
        self._thread: threading.Thread | None = None
        self._replaced = threading.Event()

    def release(self, gone: Sequence[Place], staying: Sequence[Place]) -> None:
        """Begin to give ``gone`` back: all places that are free by now."""
        self._replaced.set()
        self._replaced = threading.Event()
        arguments = (tuple(gone), tuple(staying), self._replaced, self._thread)
        self._thread = threading.Thread(target=self._try, args=arguments, name="ds_dynmo release", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for what was begun."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _try(
        self,
        gone: Sequence[Place],
        staying: Sequence[Place],
        replaced: threading.Event,
        before: threading.Thread | None,
    ) -> None:
        if before is not None:
            before.join()  # one attempt at a time
        ranks = [place.rank for place in gone]
        pause_seconds = _FIRST_PAUSE_SECONDS
        for attempt in range(1, self._attempts + 1):
            try:
                done = self._policy.release(gone, staying)
            except ReleaseRefused as error:
                if attempt == 1:
                    self._warn(f"DynMo: ranks {ranks} are idle but could not be given back: {error}")
            else:
                if done:
                    self._inform(f"DynMo: ranks {ranks}: {done}" + (f" (attempt {attempt})" if attempt > 1 else ""))
                return
            if attempt == self._attempts or self._pause(replaced, pause_seconds):
                break
            pause_seconds *= 2
        if not replaced.is_set():
            self._warn(f"DynMo: ranks {ranks} were not given back in {self._attempts} attempts, they stay idle")
