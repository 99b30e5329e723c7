"""A communicator of the backend "emulated_nccl": a stream, and the operations posted on it, which end in order.

There are two ways to run what is posted:

- The host does (default): it reads the inputs and begins the transfer on gloo when the operation is posted, and
  delivers when somebody waits. Every run is the same.
- A thread of the communicator does (environment variable ``EMULATED_OVERLAP``: the longest delay in milliseconds):
  operation after operation it waits for what the operation is behind, then for a random time (``EMULATED_SEED`` and the
  rank say which), and only then reads the inputs. The host goes on; kernels wait for the operation if their stream does.
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
Begin = Callable[
    [list[torch.Tensor], list[torch.Tensor]], list[Any]
]  # gloo's handles, for inputs and outputs on the CPU

_numbers = count()  # of this process's operations
_communicators: list[Communicator] = []


class Work(dist._Work):
    """One operation; what the caller of an asynchronous operation holds.

    Args:
        reads: the inputs; what is also in ``writes`` is replaced by the result.
        writes: the outputs, in which NaN stands until they arrive.
        begin: begins the transfer on gloo, from copies of the inputs into tensors on the CPU.
        divisor: what outputs are divided by, for averages.
        is_barrier: whether ``wait`` keeps the host waiting.
    """

    def __init__(
        self,
        communicator: Communicator,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        begin: Begin,
        divisor: int = 1,
        is_barrier: bool = False,
    ) -> None:
        super().__init__()
        self.reads, self.writes = reads, writes
        self.error: BaseException | None = None
        self.done = False
        self._communicator, self._begin, self._divisor, self._is_barrier = communicator, begin, divisor, is_barrier
        self._kept = (*reads, *writes)
        self._watch: threading.Thread | None = None

    # -- for the communicator -------------------------------------------------------------------------

    def start(self) -> None:
        """Read the inputs, poison the outputs, and begin the transfer."""
        copies = {id(tensor): library.as_cpu(tensor).clone() for tensor in self.reads}
        self._results = [
            copies[id(tensor)] if id(tensor) in copies else torch.empty(tensor.shape, dtype=tensor.dtype)
            for tensor in self.writes
        ]
        for tensor in self.writes:
            library.as_cpu(tensor).reshape(-1).view(torch.uint8).fill_(0xFF)
        self._gloo = self._begin([copies[id(tensor)] for tensor in self.reads], self._results)

    def is_transferred(self) -> bool:
        """Whether the transfer is over. gloo's handles say so only to whoever waits for them: a thread does."""
        if self._watch is None:
            self._watch = threading.Thread(target=self._wait_for_gloo, daemon=True)
            self._watch.start()
        return not self._watch.is_alive()

    def _wait_for_gloo(self) -> None:
        try:
            for work in self._gloo:
                work.wait()
        except BaseException as error:
            self.error = error

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
        self.end()

    def end(self) -> None:
        """Hold nothing any more but what the caller's wait lets go."""
        self.reads = self.writes = self._results = self._gloo = ()
        self._begin = None
        self.done = True

    # -- for the caller -------------------------------------------------------------------------------

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait for the operation."""
        self._communicator.finish(self)
        stream = torch.accelerator.current_stream(self._communicator.stream.device)
        stream.wait_event(self.event)
        if self._is_barrier:
            stream.synchronize()
        if self.error is not None:
            raise self.error
        self._kept = ()  # from now on its memory may be used again behind the current stream
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Whether the operation is over, without a wait, as NCCL's handles say it."""
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
        for tensor in self._kept:  # nobody waited: as NCCL, keep the memory until the operation is over
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
        self._known: dict[Communicator, int] = {}  # how many operations of others are over when one begins here
        self._thread: _Thread | None = None
        delay = float(os.environ.get("EMULATED_OVERLAP") or 0)
        if delay:
            seed = f"{os.environ.get('EMULATED_SEED', 0)} {os.environ.get('RANK', 0)} {len(_communicators)}"
            self._thread = _Thread(device, delay / 1000, random.Random(seed))
        _communicators.append(self)

    def post(self, work: Work, what: str, messages: Messages = ()) -> Work:
        """Put an operation behind the current stream and behind what was posted here."""
        device = self.stream.device
        self.stream.wait_stream(torch.accelerator.current_stream(device))
        with self.stream:
            for tensor in work.reads:
                library.touch(tensor, False, what)
            for tensor in work.writes:
                library.touch(tensor, True, what)
            self._log(what, messages)
            behind = self.stream.record_event()
            ticket = None if self._thread is None else library.begin_work(device.index, self.stream.stream_id)
            work.event = self.stream.record_event()
        if self._thread is not None:
            self._thread.run(work, behind, ticket)
        else:
            work.start()
            self._unfinished.append(work)
        return work

    def finish(self, until: Work | None = None) -> None:
        """Deliver what the host has begun, in order, up to ``until`` or all."""
        while self._unfinished and not (until is not None and until.done):
            self._unfinished.popleft().finish()

    def poll(self, until: Work) -> None:
        """Deliver what the host has begun and what is transferred, in order, up to ``until``."""
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
        number = next(_numbers)
        clock = library.clock(self.stream.device_index, self.stream.stream_id)
        after = []
        for other in _communicators:
            stream = other.stream.stream_id
            if other is self or stream >= len(clock):
                continue
            over = bisect_right(other._times, clock[stream])
            if over > self._known.get(other, 0):
                self._known[other] = over
                after.append(other._numbers[over - 1])
        self._numbers.append(number)
        self._times.append(clock[self.stream.stream_id])
        operation_log.write(number, self._name, self._member, self._size, what, list(messages), after)


class _Thread:
    """Runs operations, one after the other, each after a random delay."""

    def __init__(self, device: torch.device, delay_seconds: float, randomness: random.Random) -> None:
        self._delay_seconds, self._random = delay_seconds, randomness
        self._stream = torch.Stream(device)  # its kernel waits for what an operation is behind
        self._kernel_argument = torch.zeros(1, device=device)
        self._posted: queue.SimpleQueue[tuple[Work, torch.Event, int] | None] = queue.SimpleQueue()
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        self._thread = threading.Thread(target=self._main, name="emulated_nccl", daemon=True)
        self._thread.start()

    def run(self, work: Work, behind: torch.Event, ticket: int) -> None:
        self._posted.put((work, behind, ticket))

    def close(self) -> None:
        self._posted.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (posted := self._posted.get()) is not None:
            work, behind, ticket = posted
            try:
                self._stream.wait_event(behind)
                with self._stream:
                    self._kernel_argument.zero_()
                time.sleep(self._random.uniform(0, self._delay_seconds))
                work.start()
                work.finish()
            except BaseException as error:
                work.error = error
                work.end()
            finally:
                library.end_work(ticket)
            if work.error is not None:  # nobody may wait for it
                library.report(f"an operation failed in its communicator's thread: {work.error!r}")
            del posted, work, behind


def _finish_all() -> None:
    for communicator in _communicators:
        communicator.finish()


torch_device.before_synchronize.append(_finish_all)
