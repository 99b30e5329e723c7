"""Stop a run by Ctrl-C or SIGTERM at the end of a batch, the same one on every rank."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

import torch

__all__ = ["StopSignals"]

STOPPING = b"ds-dynmo-train: saves at the end of this batch and stops; Ctrl-C again ends it at once\n"


class StopSignals:
    """Takes note of SIGINT and SIGTERM while it is entered, instead of ending the process.

    A second SIGINT ends the process at once, in whatever it does. Later SIGTERMs are ignored: after the first signal
    launchers send one to each rank, and SIGKILL to those that still run 30 seconds later.

    Args:
        enabled: False: signals do what they always do, and :meth:`agreed` costs nothing. The same on every rank.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._received = 0
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
        """Return the signal that a rank has received; 0: none has. Collective.

        A signal that arrives during the call counts in the next one, since the other ranks do not know of it.
        """
        if not self._enabled:
            return 0
        received = torch.tensor(self._received, device=device)
        torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX)
        number = int(received)
        if number:
            self._end_soon(number)
        return number

    def _end_soon(self, number: int) -> None:
        self._received = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
