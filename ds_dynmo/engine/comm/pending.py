"""Posted messages: wait for them, or ask whether they are done."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ds_dynmo.engine.comm.transfer_stream import TransferStream


class PendingExchange:
    """Messages that have been posted.

    Args:
        works: torch's handles.
        buffers: sent and received tensors; held until all operations are done.
        staged: copies to make once all is received, as pairs of a tensor and the memory with its values. The values of
            several small tensors are parts of one message, which may itself come by way of the accelerator.
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

    def is_done(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once.

        ``is_completed`` of NCCL, XCCL and HCCL asks the accelerator. That of gloo stays False until ``wait`` (seen in
        torch 2.13.0), so on a CPU the first call starts a wait in a thread. Never wait here: two ranks that train may
        each wait for a message that the other begins later.
        """
        if not self._works:
            return True
        if self._stream.is_queue:
            return all(work.is_completed() for work in self._works)
        if self._waiter is None:
            self._waiter = _Waiter(self._works, self._timeout)
            self._waiter.start()
        return not self._waiter.is_alive()

    def wait(self) -> None:
        """Wait until everything is received and sent tensors may be written to again.

        Raises:
            RuntimeError: the time-out has passed, or a peer is gone.
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
    """A thread that waits for handles; a wait releases the interpreter."""

    def __init__(self, works: Sequence[Any], timeout: timedelta) -> None:
        super().__init__(name="ds_dynmo transfers", daemon=True)
        self._works, self._timeout = list(works), timeout
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            _wait(self._works, self._timeout)
        except BaseException as error:  # raised by result()
            self._error = error
        self._works.clear()

    def result(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


def _wait(works: Sequence[Any], timeout: timedelta) -> None:
    for work in works:
        work.wait(timeout)
