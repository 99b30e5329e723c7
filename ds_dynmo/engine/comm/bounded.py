"""Store operations with a bounded time, even if the link to rank 0's host is dead.

torch calls a ``TCPStore`` over a socket without a time-out. If the link dies silently, ``check`` and ``add`` wait a
quarter of an hour until the kernel gives up. So does ``wait`` after its time-out, because it then sends a cancellation
to the server, and so does the creation of a process group (seen in torch 2.13.0). So a thread makes the calls, and the
caller waits for that thread no longer than its time-out.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress
from copy import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_dynmo.torch_private import devices_of_default_group, timeout_on


class NoAnswer(RuntimeError):
    """The store, which rank 0's process holds, does not answer this rank."""


class CallThread:
    """Run calls one at a time in a daemon thread, which ends when this object is deleted."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._pending: Future[Any] | None = None
        threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def post(self, call: Callable[[], Any]) -> Future[Any]:
        """Run ``call`` in the thread, after those before."""
        answer: Future[Any] = Future()
        self._calls.put((answer, call))
        return answer

    def run(self, call: Callable[[], Any], seconds: float) -> Any:
        """Run a ``call`` of the store in the thread, and return its result.

        Time in which this process is stopped does not count.

        Raises:
            NoAnswer: not within so many seconds, or an earlier call has not returned yet.
        """
        if self._pending is not None and not self._pending.done():
            raise NoAnswer("the store of the launch, which rank 0's process holds, does not answer this rank any more")
        answer, began = self.post(call), time.monotonic()
        try:
            return answer.result(seconds)
        except NotDone:
            if answer.done():
                return answer.result()
            if time.monotonic() - began > seconds + min(1.0, seconds / 4):  # it was stopped, and the call with it
                with suppress(NotDone):
                    return answer.result(seconds)
            self._pending = answer
            raise NoAnswer(
                f"the store of the launch, which rank 0's process holds, has not answered this rank in {seconds:g} s"
            ) from None


def _serve(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (request := calls.get()) is not None:
        answer, call = request
        try:
            answer.set_result(call())
        except BaseException as error:  # raised by the caller
            answer.set_exception(error)
        del request, answer, call  # hold no references while idle


def call_within_seconds(seconds: float, make: Callable[[], Any]) -> Any:
    """Call ``make``, in which torch waits for the store, and return its result.

    Raises:
        NoAnswer: not within so many seconds.
    """
    accelerator = get_accelerator()
    device = accelerator.current_device()

    def on_device() -> Any:
        accelerator.set_device(device)  # the current device is a thread's
        return make()

    return CallThread("ds_dynmo store").run(on_device, seconds)


def meet(store: BoundedStore, name: str, world_size: int, timeout: timedelta) -> None:
    """Wait until all ranks have called this. Collective.

    Raises:
        RuntimeError: a rank did not within the time-out.
    """
    if store.add(name, 1) == world_size:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"], timeout)


class BoundedStore:
    """A ``torch.distributed.Store`` whose operations all end soon after their time-out.

    Args:
        raw: the store, for functions of torch.
        timeout_seconds: of operations without a time-out.
    """

    def __init__(self, raw: Any, timeout_seconds: float) -> None:
        self.raw = raw
        self._timeout_seconds = timeout_seconds
        self._thread = CallThread("ds_dynmo store")

    def view(self, raw: Any) -> BoundedStore:
        """Return a store over the same connection, such as a part of this one."""
        other = copy(self)
        other.raw = raw
        return other

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._run(lambda: self.raw.set(key, value))

    def get(self, key: str) -> bytes:
        """Read a key. Wait for a missing one until the time-out."""
        value: bytes = self._run(lambda: self.raw.get(key))
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read keys, all of which exist."""
        values: list[bytes] = self._run(lambda: self.raw.multi_get(list(keys)))
        return values

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._run(lambda: self.raw.check(list(keys))))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys."""
        for key in keys:
            self._run(lambda key=key: self.raw.delete_key(key))  # type: ignore[misc]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return int(self._run(lambda: self.raw.add(key, amount)))

    def set_first(self, key: str, value: str) -> None:
        """Write a key, unless a rank has."""
        self._run(lambda: self.raw.compare_set(key, "", value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            RuntimeError: a key is missing after the time-out.
        """
        limit = timedelta(seconds=self._timeout_seconds) if timeout is None else timeout
        self._thread.run(lambda: self.raw.wait(list(keys), limit), limit.total_seconds() + self._timeout_seconds)

    def _run(self, call: Callable[[], Any]) -> Any:
        return self._thread.run(call, self._timeout_seconds)


def served_devices() -> dict[str, torch.device]:
    """Return the devices for which the default group has a backend, by type."""
    return {device.type: device for device in devices_of_default_group()}


def default_timeout() -> timedelta:
    """Return the time-out of the default group's operations: on the accelerator's devices, else on others."""
    served = served_devices()
    return timeout_on(served.get(get_accelerator().device_name(), next(iter(served.values()))))


def bindable_device() -> torch.device | None:
    """Return the device that worlds of several ranks are bound to, as DeepSpeed 0.19.8 binds the launch's; None: none.

    torch 2.13.0 requires an index, and a backend for the device in every later group. The control plane's backend is
    gloo, which serves no accelerators except those called "cuda".
    """
    device, by_gloo = torch.device(get_accelerator().current_device_name()), dist.Backend.backend_capability["gloo"]
    can_bind = device.index is not None and device.type in by_gloo and device.type in served_devices()
    return device if can_bind else None
