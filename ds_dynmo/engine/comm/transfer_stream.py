"""The accelerator stream for transfers, besides the compute stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


class TransferStream:
    """A stream that orders transfers and the work of layers, so that neither waits longer than necessary.

    NCCL runs the operations of a process group on the group's stream. They wait for the stream that is current when
    they are posted, and ``Work.wait`` makes the current stream wait for them. The copies into and out of messages would
    be queued behind the layers if they ran on the compute stream. So operations and copies run on this stream, and two
    events order it:

    - *ready*, recorded on the compute stream when transfers are posted. By then the sent tensors have been written, and
      earlier uses of the receive buffers' memory have ended. Transfers do not wait for layers that are queued later.
    - *arrived*, recorded on this stream after the last copy. The compute stream waits for it before it uses what
      arrived.

    Tensors that were allocated on the compute stream are used here. The code that posts transfers holds these tensors
    until the compute stream waits for *arrived*. Only then may the allocator reuse their memory.

    On a CPU this does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else get_accelerator().Stream()

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Queue on this stream, after everything that the compute stream has queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            yield

    @property
    def is_queue(self) -> bool:
        """Whether operations are queued on an accelerator."""
        return self._stream is not None

    def event(self) -> Any:
        """Record when the accelerator gets here on the current stream; None: it cannot time events."""
        if get_accelerator().use_host_timers():
            return None
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def before_compute(self) -> Iterator[None]:
        """Queue on this stream, and let the compute stream wait for it afterwards."""
        if self._stream is None:
            yield
            return
        with get_accelerator().stream(self._stream):
            yield
        get_accelerator().current_stream().wait_stream(self._stream)
