"""The stream on which an accelerator queues transfers, beside the one on which it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


class TransferStream:
    """Order transfers against the work of layers, without making either wait longer than it has to.

    NCCL runs the operations of a process group on a stream of that group's: it lets them wait for the stream that is
    current when they are posted, and ``Work.wait`` lets the stream that is current then wait for them. What surrounds
    them, copies into messages and out of them, would be queued behind the layers on the stream of the layers. So both
    are done on this stream, and two events order it:

    - *ready*, recorded on the compute stream when transfers are posted: what is sent has been written by then, and
      whatever used the memory of the receive buffers before is over. What the layers queue later is not waited for.
    - *arrived*, recorded here behind the last copy: the compute stream waits for it before it touches what arrived.

    Tensors made on the compute stream are used here. Whoever posts transfers holds those tensors until the compute
    stream waits for *arrived*: only then may the allocator give their memory to others.

    On a CPU, where nothing is queued, this does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else get_accelerator().Stream()

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Queue on this stream, behind what the compute stream was given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            yield

    @property
    def is_queue(self) -> bool:
        """Whether what is done here is queued on an accelerator."""
        return self._stream is not None

    def event_after(self, queue: Callable[[], None]) -> Any:
        """Return an event behind what ``queue`` puts on a stream of its own: no transfer waits for that."""
        event, stream = get_accelerator().Event(), get_accelerator().Stream()
        with get_accelerator().stream(stream):
            queue()
            event.record(stream)
        return event

    @contextmanager
    def before_compute(self) -> Iterator[None]:
        """Queue on this stream; what the compute stream is given afterwards waits for it."""
        if self._stream is None:
            yield
            return
        with get_accelerator().stream(self._stream):
            yield
        get_accelerator().current_stream().wait_stream(self._stream)
