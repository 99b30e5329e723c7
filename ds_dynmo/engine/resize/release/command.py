"""A release policy that runs a user's program with the free accelerators."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from ds_dynmo.engine.resize.release.policy import RankLocation, ReleaseRefused

_SHOWN = 500  # characters shown of the output of a program that failed


class Command:
    """Runs ``program`` with ``{"released": [...], "staying": [...]}`` on its standard input.

    Each entry has the rank at the launch, the host and the device. Released ranks' processes end.

    Args:
        program: the program and its arguments; no shell is involved.
        timeout_seconds: after which it is killed, which counts as a failure.
    """

    def __init__(self, program: Sequence[str], timeout_seconds: float) -> None:
        self._program = list(program)
        self._timeout_seconds = timeout_seconds

    def release(self, released: Sequence[RankLocation], staying: Sequence[RankLocation]) -> str:
        """Run it; an exit code other than 0 is a refusal."""
        locations = {"released": released, "staying": staying}
        message = json.dumps({name: [location.as_record() for location in found] for name, found in locations.items()})
        try:
            done = subprocess.run(
                self._program,
                input=message,
                capture_output=True,
                text=True,
                timeout=self._timeout_seconds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReleaseRefused(f"{self._program[0]}: {error}") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-_SHOWN:]
            raise ReleaseRefused(f"{self._program[0]} ended with exit code {done.returncode}: {said}")
        return f"{self._program[0]} was told"
