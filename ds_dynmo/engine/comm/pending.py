"""Posted messages: wait for them, or ask whether they are done."""

from __future__ import annotations

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

    def is_done(self) -> bool:
        """Return whether the accelerator knows that :meth:`wait` would return at once; False on a CPU.

        ``is_completed`` of NCCL, XCCL and HCCL asks the accelerator; that of gloo stays False until ``wait`` (seen in
        torch 2.13.0). Never wait here: two ranks that train may each wait for a message that the other begins later.
        """
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait until everything is received and sent tensors may be written to again.

        Raises:
            RuntimeError: the time-out has passed, or a peer is gone.
        """
        with self._stream.before_compute():
            for work in self._works:
                work.wait(self._timeout)
            for tensor, arrived in self._staged:
                tensor.copy_(arrived)
        self._works.clear()
        self._buffers.clear()
        self._staged.clear()
