"""Calls of a release policy in a thread, once the released processes have ended.

The resource manager may kill processes on an accelerator that it takes back, and a killed process may fail the whole
job. So the policy is called only after the released processes have announced their end and have had time to end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ds_dynmo.engine.resize.release.policy import RankLocation, ReleasePolicy, ReleaseRefused

_POLL_SECONDS = 0.5  # between checks for ended processes


class PolicyRunner:
    """Runs a policy on rank 0, one release after the other.

    Args:
        warn, inform: log a refusal, or an action.
        have_exited: returns whether the processes of these ranks have announced their end.
        patience_seconds: the longest wait for them; the accelerator of a hanging process is not handed back.
        delay_seconds: time to end after the announcement.
        pause: waits a number of seconds; for tests.
    """

    def __init__(
        self,
        policy: ReleasePolicy,
        warn: Callable[[str], None],
        inform: Callable[[str], None],
        *,
        have_exited: Callable[[Sequence[RankLocation]], bool],
        patience_seconds: float,
        delay_seconds: float,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._policy, self._warn, self._inform, self._pause = policy, warn, inform, pause
        self._have_exited, self._patience_seconds, self._delay_seconds = have_exited, patience_seconds, delay_seconds
        self._thread: threading.Thread | None = None

    def release(self, released: Sequence[RankLocation], staying: Sequence[RankLocation]) -> None:
        """Start to hand back ``released``: all ranks that are free by now."""
        arguments = (released, staying, self._thread)
        self._thread = threading.Thread(target=self._run, args=arguments, name="ds_dynmo release", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for started releases."""
        if self._thread is not None:
            self._thread.join()

    def _run(
        self, released: Sequence[RankLocation], staying: Sequence[RankLocation], before: threading.Thread | None
    ) -> None:
        if before is not None:
            before.join()
        ranks = [at.rank for at in released]
        if not self._wait_for_exit(released):
            self._warn(
                f"DynMo: ranks {ranks} were released, but not all of their processes have ended within "
                f"{self._patience_seconds:g} s: their accelerators are not given back"
            )
            return
        try:
            action = self._policy.release(released, staying)
        except ReleaseRefused as error:
            self._warn(f"DynMo: ranks {ranks} are idle but were not given back: {error}. The next release names them")
        else:
            if action:
                self._inform(f"DynMo: ranks {ranks}: {action}")

    def _wait_for_exit(self, released: Sequence[RankLocation]) -> bool:
        """Wait until the processes of ``released`` have ended; return whether they did in time."""
        waited_seconds = 0.0
        while not self._have_exited(released):
            if waited_seconds >= self._patience_seconds:
                return False
            self._pause(_POLL_SECONDS)
            waited_seconds += _POLL_SECONDS
        self._pause(self._delay_seconds)
        return True
