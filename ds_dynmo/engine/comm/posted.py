"""Collectives that are waited for when their result is read.

All ranks of a group post a broadcast and continue. On a receiving rank, :class:`PostedTensor` represents the value: a
tensor whose first reader waits until it has arrived. The other ranks only have to have posted the broadcast. So any
rank may read at any time, or not at all.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_dynmo.torch_private import subclassed, tree_map, without_torch_function

if TYPE_CHECKING:
    from ds_dynmo.engine.comm.watch import Watch

_UNDER_WAY: set[Posted] = set()
_SECONDS_TO_END = 5.0  # that Python and torch may take, after a rank was lost
_MOMENT = timedelta(seconds=0.25)  # after which a reader looks whether a rank is lost


class Posted:
    """A collective that this rank has posted.

    Args:
        tensor: nothing else may write to it until the result has arrived.
        wait: waits until the result has arrived or left.
        watch: notices that a rank is lost while this one waits outside of the engine's operations.
    """

    def __init__(self, tensor: torch.Tensor, wait: Callable[[], object], watch: Watch) -> None:
        self.tensor = tensor
        self.watch = weakref.ref(watch)  # that of a deleted engine ends, unless one of its losses is still to be read
        self._wait: Callable[[], object] | None = wait
        self._one_at_a_time = threading.Lock()
        _UNDER_WAY.add(self)

    def wait(self) -> None:
        """Wait until the result has arrived or left; return at once if it has.

        Raises:
            RuntimeError: another rank is gone.
        """
        with self._one_at_a_time:  # another thread may wait too
            if self._wait is not None:
                try:
                    self._wait()
                finally:
                    _UNDER_WAY.discard(self)
                self._wait = None


class PostedReduction(Posted):
    """A reduction over the world.

    Attributes:
        number: of the collective (:class:`ds_dynmo.engine.comm.watch.Watch`).
        timeout: that it waits for the other ranks.
    """

    def __init__(
        self, tensor: torch.Tensor, wait: Callable[[], object], watch: Watch, number: int, timeout: timedelta
    ) -> None:
        super().__init__(tensor, wait, watch)
        self.number, self.timeout = number, timeout


class PostedBroadcast(Posted):
    """A broadcast from rank ``src``. Construction is collective."""

    def __init__(self, tensor: torch.Tensor, src: int, group: Any, watch: Watch) -> None:
        if dist.get_rank() != src:
            tensor.fill_(torch.nan)  # so that a read without a wait is noticed
        self._work = dist.broadcast(tensor, src, group=group, async_op=True)
        super().__init__(tensor, self._work.wait, watch)

    def element(self, index: int) -> PostedTensor:
        """Return a tensor for one element of the value."""
        return PostedTensor(self.tensor[index], partial(self._read, self.watch()))

    def _read(self, watch: Watch | None) -> None:
        """Wait in code of the user.

        Raises:
            RankLostError: a rank is lost.
        """
        try:
            if watch is not None and self.tensor.is_cpu:  # a wait for an accelerator's returns at once
                with watch.waiting():
                    while self._wait is not None and not self._comes():
                        watch.check()
            self.wait()
        except Exception as error:
            if watch is not None:
                watch.explain(error)
            raise

    def _comes(self) -> bool:
        """Wait for a moment; return whether the result has come, or an error."""
        with suppress(RuntimeError):  # of the time-out
            self._work.wait(_MOMENT)
        return bool(self._work.is_completed())


def wait_for_posted() -> None:
    """Wait for all that this process has posted, so that it does not end before others have received them."""
    while _UNDER_WAY:
        posted = next(iter(_UNDER_WAY))
        watch = posted.watch()
        with suppress(RuntimeError), nullcontext() if watch is None else watch.ending():
            posted.wait()
        _UNDER_WAY.discard(posted)


_ENDS_IN_TIME = threading.Event()


def forget_posted() -> None:
    """Wait for nothing at the end: a rank is lost, and the others end, too."""
    _UNDER_WAY.clear()
    _ENDS_IN_TIME.set()


@atexit.register
def _end() -> None:
    """Let this process end; after a rank was lost in time, as gloo waits for what a stopped one was to send."""
    wait_for_posted()
    if _ENDS_IN_TIME.is_set():  # nothing of Python runs by then
        faulthandler.dump_traceback_later(_SECONDS_TO_END, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115


class PostedTensor(torch.Tensor):
    """A tensor whose value has yet to arrive. Each use waits for it, and returns plain tensors.

    Args:
        value: has the value once ``wait`` returns.
    """

    _value: torch.Tensor
    _wait: Callable[[], None]

    @staticmethod
    def __new__(cls, value: torch.Tensor, wait: Callable[[], None]) -> PostedTensor:
        self = subclassed(cls, value)
        self._value, self._wait = value, wait
        return self

    def __init__(self, value: torch.Tensor, wait: Callable[[], None]) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run operations called from Python, ``numpy()``, ``float()`` and pickling included."""
        with without_torch_function():
            return func(*tree_map(_arrived, args), **tree_map(_arrived, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run operations called in other ways, such as collectives."""
        return func(*tree_map(_arrived, args), **tree_map(_arrived, kwargs or {}))


def _arrived(value: Any) -> Any:
    if not isinstance(value, PostedTensor):
        return value
    value._wait()
    value._wait = _has_arrived  # it keeps nothing any more
    return value._value


def _has_arrived() -> None:
    pass
