"""A process beside the test that claims a folder of checkpoints, and does one thing at a time when it is told to."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.files.claims import check_claim, claim_folder


class Claimant:
    """A process that lives while this is entered, unless it is killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __enter__(self) -> Claimant:
        self._here, there = multiprocessing.Pipe()
        self.number = os.fork()
        if not self.number:
            self._here.close()
            self._obey(there)
        there.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def _obey(self, told: Any) -> None:
        try:
            with ExitStack() as claims:
                while (what := told.recv()) != "end":
                    try:
                        if what == "claim":
                            claims.enter_context(claim_folder(self._folder))
                        else:
                            check_claim(self._folder)
                        told.send("")
                    except (CheckpointError, ConfigError) as refused:
                        told.send(str(refused))
            told.send("")
        finally:
            os._exit(0)

    def tell(self, what: str) -> str:
        """Let it "claim" the folder, "check" whether it may save there, or "end"; return its error, if it has one."""
        self._here.send(what)
        answer: str = self._here.recv()
        return answer

    def kill(self) -> None:
        """End it as a lost process ends."""
        if self.number:
            os.kill(self.number, signal.SIGKILL)
            os.waitpid(self.number, 0)
            self._here.close()
            self.number = 0
