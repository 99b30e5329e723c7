"""Stop a run by Ctrl-C or SIGTERM at the end of a batch, the same one on every rank."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

import torch

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.comm.posted import PostedReduction

__all__ = ["StopSignals"]

STOPPING = b"ds-dynmo-train: saves at the end of the next batch and stops; Ctrl-C again ends it at once\n"
_AGREEING = "agreeing whether to stop"


class StopSignals:
    """Takes note of SIGINT and SIGTERM while it is entered, instead of ending the process.

    A second SIGINT ends the process at once, in whatever it does. Later SIGTERMs are ignored: after the first signal
    launchers send one to each rank, and SIGKILL to those that still run 30 seconds later.

    Args:
        enabled: False: signals do what they always do, and :meth:`agreed` costs nothing. The same on every rank.
        comm: of the engine; None: it has none, and ranks wait for each other after every batch.
    """

    def __init__(self, enabled: bool, comm: Communicator | None = None) -> None:
        self._enabled, self._comm = enabled, comm
        self._received = 0
        self._posted: PostedReduction | None = None
        self._agreed = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if self._enabled:
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Restore what signals do, unless one came: then the process is about to end."""
        if not self._received:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._end_soon(number)
        if os.environ.get("RANK", "0") == "0":
            os.write(2, STOPPING)  # print may be what the signal has interrupted

    def agreed(self, device: torch.device) -> int:
        """Return the signal that a rank had received at the end of the batch before; 0: none had. Collective.

        Ranks exchange it beside the batch, so none waits for those that have not ended this one. A signal that arrives
        during the call counts in a later one, since the other ranks do not know of it.
        """
        if not self._enabled:
            return 0
        if self._comm is None:
            received = torch.tensor(self._received, device=device)
            torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX)
            self._agreed = int(received)
        else:
            self.settle()
            if not self._agreed:
                self._posted = self._comm.post_max(torch.tensor([self._received], device="cpu"))
        if self._agreed:
            self._end_soon(self._agreed)
        return self._agreed

    def settle(self) -> None:
        """Read what ranks exchange, before their world ends. Collective."""
        if self._comm is not None and self._posted is not None:
            posted, self._posted = self._posted, None
            with self._comm.operation(_AGREEING):
                self._agreed = int(self._comm.read_max(posted))

    def _end_soon(self, number: int) -> None:
        self._received = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
