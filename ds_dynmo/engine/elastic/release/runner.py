"""Call a release policy in a thread beside the training, retry it where it is refused, and report the first refusal.

The resource manager may kill what still runs on an accelerator that it takes back, and a killed process can fail the
whole job. So the policy is called only when the released processes have said that they end, and have had time to do so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ds_dynmo.engine.elastic.release.policy import RankLocation, ReleasePolicy, ReleaseRefused

_FIRST_PAUSE_SECONDS = 1.0  # doubled after each refusal
_POLL_SECONDS = 0.5  # between looks whether processes have ended


class PolicyRunner:
    """Runs a policy on rank 0, one release at a time: a later one takes the place of one that is still being tried.

    Args:
        warn, inform: report a line, of a refusal and of what was done.
        attempts: how often a release is tried.
        have_exited: have the processes of these ranks said that they end?
        patience_seconds: how long they are waited for; what a process that hangs holds is not given back.
        delay_seconds: how long they have to end after they said so.
        pause: waits so many seconds, or less where the event is set; for tests.
    """

    def __init__(
        self,
        policy: ReleasePolicy,
        warn: Callable[[str], None],
        inform: Callable[[str], None],
        *,
        attempts: int,
        have_exited: Callable[[Sequence[RankLocation]], bool],
        patience_seconds: float,
        delay_seconds: float,
        pause: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._policy, self._attempts, self._pause = policy, attempts, pause
        self._have_exited, self._patience_seconds, self._delay_seconds = have_exited, patience_seconds, delay_seconds
        self._warn, self._inform = warn, inform
        self._thread: threading.Thread | None = None
        self._replaced = threading.Event()

    def release(self, released: Sequence[RankLocation], staying: Sequence[RankLocation]) -> None:
        """Begin to give ``released`` back: all ranks that are free by now."""
        if self._policy.silent:
            return
        self._replaced.set()
        self._replaced = threading.Event()
        arguments = (tuple(released), tuple(staying), self._replaced, self._thread)
        self._thread = threading.Thread(target=self._try, args=arguments, name="ds_dynmo release", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for a release that has begun."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _try(
        self,
        released: Sequence[RankLocation],
        staying: Sequence[RankLocation],
        replaced: threading.Event,
        before: threading.Thread | None,
    ) -> None:
        if before is not None:
            before.join()  # one attempt at a time
        ranks = [at.rank for at in released]
        if not self._wait_for_exit(released, replaced):
            if not replaced.is_set():
                self._warn(
                    f"DynMo: ranks {ranks} were released, but not all of their processes have ended within "
                    f"{self._patience_seconds:g} s: their accelerators are not given back"
                )
            return
        pause_seconds = _FIRST_PAUSE_SECONDS
        for attempt in range(1, self._attempts + 1):
            try:
                done = self._policy.release(released, staying)
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

    def _wait_for_exit(self, released: Sequence[RankLocation], replaced: threading.Event) -> bool:
        """Have the processes of ``released`` ended? False also if a later release takes over meanwhile."""
        waited_seconds = 0.0
        while not self._have_exited(released):
            if waited_seconds >= self._patience_seconds or self._pause(replaced, _POLL_SECONDS):
                return False
            waited_seconds += _POLL_SECONDS
        return not (self._delay_seconds and self._pause(replaced, self._delay_seconds))
