"""Bound the time of every operation on the store of a launch, even if the link to rank 0's host is dead.

torch asks a ``TCPStore`` over a socket without a time-out. Once the link is dead and no packet says so, ``check`` and
``add`` wait a quarter of an hour for the kernel to give up. So does a ``wait`` whose own time is over, because it then
asks the server to forget it, and so does whatever makes a process group (seen in torch 2.13.0). So a thread asks, and
the caller waits for that thread no longer than its time-out.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from copy import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_dynmo.torch_private import devices_of_default_group, timeout_on


class NoAnswer(RuntimeError):
    """The store, which rank 0's process holds, does not answer this rank."""


class _Line:
    """Ask one question at a time, in a thread that ends when nobody holds this any more."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._unanswered: Future[Any] | None = None
        threading.Thread(target=_ask, args=(self._questions,), name="ds_dynmo store", daemon=True).start()
        weakref.finalize(self, self._questions.put, None)

    def ask(self, question: Callable[[], Any], seconds: float) -> Any:
        """Call ``question`` in the thread, and return what it returns.

        Raises:
            NoAnswer: not within so many seconds, or an earlier question was not answered yet.
        """
        if self._unanswered is not None and not self._unanswered.done():
            raise NoAnswer("the store of the launch, which rank 0's process holds, does not answer this rank any more")
        answer: Future[Any] = Future()
        self._questions.put((answer, question))
        try:
            return answer.result(seconds)
        except NotDone:
            if answer.done():
                return answer.result()
            self._unanswered = answer
            raise NoAnswer(
                f"the store of the launch, which rank 0's process holds, has not answered this rank in {seconds:g} s"
            ) from None


def _ask(questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (asked := questions.get()) is not None:
        answer, question = asked
        try:
            answer.set_result(question())
        except BaseException as error:  # to be raised by whoever asked
            answer.set_exception(error)
        del asked, answer, question  # nothing is held while there is nothing to ask


def within(seconds: float, make: Callable[[], Any]) -> Any:
    """Call ``make``, which waits for the store in functions of torch's own, and return what it returns.

    Raises:
        NoAnswer: not within so many seconds.
    """
    accelerator = get_accelerator()
    device = accelerator.current_device()

    def made() -> Any:
        accelerator.set_device(device)  # which each thread has one of
        return make()

    return _Line().ask(made, seconds)


def meet(store: BoundedStore, name: str, world_size: int, timeout: timedelta) -> None:
    """Wait until all ranks have come here. Collective.

    Raises:
        RuntimeError: one did not within the time-out.
    """
    if store.add(name, 1) == world_size:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"], timeout)


class BoundedStore:
    """A ``torch.distributed.Store`` whose operations all end soon after their time-out.

    Args:
        raw: the store; torch's own functions take this one.
        timeout_seconds: of an operation that has no time-out of its own.
    """

    def __init__(self, raw: Any, timeout_seconds: float) -> None:
        self.raw = raw
        self._timeout_seconds = timeout_seconds
        self._line = _Line()

    def view(self, raw: Any) -> BoundedStore:
        """Make another store over the same connection, such as a part of this one."""
        other = copy(self)
        other.raw = raw
        return other

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._ask(lambda: self.raw.set(key, value))

    def get(self, key: str) -> bytes:
        """Read a key. One that is not there is waited for, as long as any operation may take."""
        value: bytes = self._ask(lambda: self.raw.get(key))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._ask(lambda: self.raw.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return int(self._ask(lambda: self.raw.add(key, amount)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            RuntimeError: they are not, within the time-out.
        """
        limit = timedelta(seconds=self._timeout_seconds) if timeout is None else timeout
        self._line.ask(lambda: self.raw.wait(list(keys), limit), limit.total_seconds() + self._timeout_seconds)

    def _ask(self, question: Callable[[], Any]) -> Any:
        return self._line.ask(question, self._timeout_seconds)


def served_devices() -> dict[str, torch.device]:
    """Map the types of the devices that the default group has a backend for."""
    return {device.type: device for device in devices_of_default_group()}


def default_timeout() -> timedelta:
    """Return how long operations of the default group wait: on the accelerator's devices, else on others."""
    served = served_devices()
    return timeout_on(served.get(get_accelerator().device_name(), next(iter(served.values()))))


def bindable_device() -> torch.device | None:
    """Return the device that worlds of several ranks are bound to, as DeepSpeed 0.19.8 binds the launch's; None: none.

    torch 2.13.0 requires an index, and that every group made afterwards has a backend for the device. The control
    plane's is gloo, which serves no accelerators but those called "cuda".
    """
    device, by_gloo = torch.device(get_accelerator().current_device_name()), dist.Backend.backend_capability["gloo"]
    can_bind = device.index is not None and device.type in by_gloo and device.type in served_devices()
    return device if can_bind else None
