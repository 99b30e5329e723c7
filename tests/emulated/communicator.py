"""A communicator of the backend "emulated_nccl": a stream, and the operations posted on it, which end in order.

There are two ways to run what is posted:

- The host does (default): it reads the inputs and begins the transfer on gloo when the operation is posted, and
  delivers when somebody waits. Every run is the same.
- A thread of the communicator does (``EMULATED_OVERLAP``: the longest delay in milliseconds): one operation after the
  other, it waits for what the operation is behind, then for a random time (of ``EMULATED_SEED`` and the rank), and only
  then reads the inputs. The host goes on; kernels and host waits that are behind the operation wait for its end.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from tests.emulated import operation_log, torch_device

library = torch_device.library

Messages = Sequence[tuple[str, int, int]]  # kind, peer and bytes of each
Begin = Callable[[list[torch.Tensor], list[torch.Tensor]], list[Any]]  # inputs and outputs on the CPU: gloo's handles

_numbers = count()  # of this process's operations
_communicators: list[Communicator] = []


class Work(dist._Work):
    """One operation; what the caller of an asynchronous operation holds.

    Args:
        what: the operation, for messages.
        reads: the inputs; one that is also in ``writes`` is replaced by the result.
        writes: the outputs, in which NaN stands until they arrive.
        begin: begins the transfer on gloo, from copies of the inputs into tensors on the CPU.
        divisor: what outputs are divided by, for averages.
        is_barrier: whether ``wait`` keeps the host waiting.

    Attributes:
        done: whether the outputs have arrived, or never will.
        error: why they never will.
    """

    def __init__(
        self,
        communicator: Communicator,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        begin: Begin,
        divisor: int = 1,
        is_barrier: bool = False,
    ) -> None:
        super().__init__()
        self.what, self.reads, self.writes = what, reads, writes
        self.done = False
        self.error: BaseException | None = None
        self._communicator, self._begin, self._divisor, self._is_barrier = communicator, begin, divisor, is_barrier
        self._kept = (*reads, *writes)
        self._waited = False
        self._watch: threading.Thread | None = None

    # -- for the communicator -------------------------------------------------------------------------

    def start(self) -> None:
        """Read the inputs, poison the outputs, and begin the transfer."""
        copies = {id(tensor): library.as_cpu(tensor).clone() for tensor in self.reads}
        self._results = [
            copies[id(tensor)] if id(tensor) in copies else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for tensor in self.writes
        ]
        for tensor in self.writes:
            library.as_cpu(tensor).reshape(-1).view(torch.uint8).fill_(0xFF)
        try:
            self._transfers = self._begin([copies[id(tensor)] for tensor in self.reads], self._results)
        except RuntimeError as error:  # gloo knows already that the peer is gone; NCCL's host would not
            self._transfers, self.error = [], error.with_traceback(None)

    def is_transferred(self) -> bool:
        """Return whether the transfer is over. gloo says so only to whoever waits: a thread does."""
        if self._watch is None:
            self._watch = threading.Thread(target=self._wait_for_gloo, daemon=True)
            self._watch.start()
        return not self._watch.is_alive()

    def _wait_for_gloo(self) -> None:
        try:
            for transfer in self._transfers:
                transfer.wait()
        except RuntimeError as error:
            self.error = error.with_traceback(None)  # else its frames would hold this operation

    def finish(self) -> None:
        """Wait for the transfer and deliver the results."""
        if self._watch is None:
            self._wait_for_gloo()
        else:
            self._watch.join()
        if self.error is None:
            for tensor, result in zip(self.writes, self._results):
                if self._divisor != 1:
                    result.div_(self._divisor)
                library.as_cpu(tensor).copy_(result)
        self.end(self.error)

    def end(self, error: BaseException | None) -> None:
        """Let go of everything but the memory that the caller's wait lets go."""
        self.reads = self.writes = self._results = self._transfers = ()
        self._begin = None
        self.error, self.done = error, True
        if error is not None and self._waited:
            self._report()

    def _report(self) -> None:
        library.report(f"{self.what} failed, and nobody waits for it any more: {self.error!r}")

    # -- for the caller -------------------------------------------------------------------------------

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait for the operation; its memory may then be used again behind that stream."""
        self._communicator.finish(self)
        stream = torch.accelerator.current_stream(self._communicator.stream.device)
        stream.wait_event(self.event)
        if self._is_barrier:
            stream.synchronize()
        self._waited, self._kept = True, ()
        if self.error is not None:
            raise self.error
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Return whether the operation is over, without a wait, as NCCL's does."""
        if not self.done:
            self._communicator.poll(self)
        return self.done and self.event.query()

    def is_success(self) -> bool:
        return self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future

    def __del__(self) -> None:
        if not self._waited and self.error is not None:
            self._report()
        for tensor in self._kept:  # nobody waited: as NCCL does, keep the memory until the operation is over
            tensor.record_stream(self._communicator.stream)


class Communicator:
    """A stream, and what is posted on it.

    Args:
        name: which the communicator's members share, and no other communicator has.
        member: this rank's place in the group.
        size: how many members the group has.
    """

    def __init__(self, name: str, member: int, size: int, device: torch.device) -> None:
        self.stream = torch.Stream(device)
        self._name, self._member, self._size = name, member, size
        self._unfinished: deque[Work] = deque()  # what the host has begun and not yet delivered
        self._numbers: list[int] = []  # of the operations posted here
        self._times: list[int] = []  # of the stream when they were posted
        self._over: dict[Communicator, int] = {}  # how many operations of others the last one posted here is behind
        self._thread = _Thread(device, len(_communicators)) if library.delay() else None
        _communicators.append(self)

    def post(self, work: Work, messages: Messages = ()) -> Work:
        """Put an operation behind the current stream and behind what was posted here."""
        device = self.stream.device
        self.stream.wait_stream(torch.accelerator.current_stream(device))
        with self.stream:
            for tensor in work.reads:
                library.touch(tensor, False, work.what)
            for tensor in work.writes:
                library.touch(tensor, True, work.what)
            self._log(work.what, messages)
            if self._thread is None:
                work.start()
                self._unfinished.append(work)
            else:
                behind = self.stream.record_event()
                self._thread.add(work, behind, library.begin_work(device.index, self.stream.stream_id))
            work.event = self.stream.record_event()
        return work

    def finish(self, until: Work | None = None) -> None:
        """Deliver what the host has begun, in order, up to ``until`` or all."""
        while self._unfinished and not (until is not None and until.done):
            self._unfinished.popleft().finish()

    def poll(self, until: Work) -> None:
        """Deliver what the host has begun and gloo has transferred, in order, up to ``until``."""
        while self._unfinished and not until.done and self._unfinished[0].is_transferred():
            self._unfinished.popleft().finish()

    def close(self) -> None:
        """Finish what was posted, whether it succeeds or not, and end the thread."""
        with suppress(ValueError):  # closed before
            _communicators.remove(self)
        self.finish()
        if self._thread is not None:
            self._thread.close()

    def _log(self, what: str, messages: Messages) -> None:
        clock = library.clock(self.stream.device_index, self.stream.stream_id)
        after = []
        for other in _communicators:
            stream = other.stream.stream_id
            over = bisect_right(other._times, clock[stream]) if other is not self and stream < len(clock) else 0
            if over > self._over.get(other, 0):
                self._over[other] = over
                after.append(other._numbers[over - 1])
        self._numbers.append(next(_numbers))
        self._times.append(clock[self.stream.stream_id])
        operation_log.write(self._numbers[-1], self._name, self._member, self._size, what, list(messages), after)


class _Thread:
    """Runs operations, one after the other, each after a random delay.

    Args:
        number: of the communicator, which decides the delays together with the seed and the rank.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self._random = random.Random(f"{os.environ.get('EMULATED_SEED', 0)} {os.environ.get('RANK', 0)} {number}")
        self._stream = torch.Stream(device)  # a kernel on it waits for what an operation is behind
        with self._stream:
            self._written = torch.zeros(1, device=device)
        self._posted: queue.SimpleQueue[tuple[Work, torch.Event, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="emulated_nccl", daemon=True)
        self._thread.start()

    def add(self, work: Work, behind: torch.Event, ticket: int) -> None:
        """Run an operation behind an event, and then end the ticket that others wait for."""
        self._posted.put((work, behind, ticket))

    def close(self) -> None:
        """Run what was added, and end."""
        self._posted.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (posted := self._posted.get()) is not None:
            work, behind, ticket = posted
            try:
                self._stream.wait_event(behind)
                with self._stream:
                    self._written.zero_()
                time.sleep(self._random.uniform(0, library.delay()) / 1000)
                work.start()
                work.finish()
            except Exception as error:
                work.end(error.with_traceback(None))
            finally:
                library.end_work(ticket)
            del posted, work, behind


def _finish_all() -> None:
    for communicator in _communicators:
        communicator.finish()


torch_device.before_synchronize.append(_finish_all)
