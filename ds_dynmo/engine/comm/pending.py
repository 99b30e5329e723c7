"""Wait for messages that were posted, or ask whether they are done."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ds_dynmo.engine.comm.transfer_stream import TransferStream


class PendingExchange:
    """Messages that were posted: ask whether they are done, or wait for them.

    Args:
        works: torch's handles.
        buffers: what is sent and received; held until all is done.
        staged: what is to be copied once all is received, each tensor with the memory that its values come in. Those
            of several small tensors are parts of one message, which may itself come by way of the accelerator.
    """

    def __init__(
        self,
        works: Sequence[Any],
        buffers: list[torch.Tensor],
        staged: list[tuple[torch.Tensor, torch.Tensor]],
        stream: TransferStream,
        timeout: timedelta,
    ) -> None:
        self._works, self._buffers, self._staged = list(works), buffers, staged
        self._stream, self._timeout = stream, timeout
        self._waiter: _Waiter | None = None
        self._arrived: Any = None

    def is_done(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once.

        Handles may say so only to whoever waits for them: ``is_completed`` of NCCL's, XCCL's and HCCL's looks whether
        the accelerator is done, that of gloo's stays False until then (seen in torch 2.13.0). So somebody waits, from
        the first call on: a stream of its own, and on a CPU a thread.
        """
        if not self._works:
            return True
        if self._stream.is_queue:
            if self._arrived is None:
                self._arrived = self._stream.event_after(lambda: _wait(self._works, self._timeout))
            return bool(self._arrived.query())
        if self._waiter is None:
            self._waiter = _Waiter(self._works, self._timeout)
            self._waiter.start()
        return not self._waiter.is_alive()

    def wait(self) -> None:
        """Wait until all is received and everything that was sent may be written to again.

        Raises:
            RuntimeError: not within the time-out, or a peer is gone.
        """
        with self._stream.before_compute():
            if self._waiter is not None:
                self._waiter.result()
            else:
                _wait(self._works, self._timeout)
            for tensor, arrived in self._staged:
                tensor.copy_(arrived)
        self._works.clear()
        self._buffers.clear()
        self._staged.clear()


class _Waiter(threading.Thread):
    """Wait for handles, which releases the interpreter meanwhile."""

    def __init__(self, works: Sequence[Any], timeout: timedelta) -> None:
        super().__init__(name="ds_dynmo transfers", daemon=True)
        self._works, self._timeout = list(works), timeout
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            _wait(self._works, self._timeout)
        except BaseException as error:  # to be raised by whoever asks for the result
            self._error = error
        self._works.clear()

    def result(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


def _wait(works: Sequence[Any], timeout: timedelta) -> None:
    for work in works:
        work.wait(timeout)
