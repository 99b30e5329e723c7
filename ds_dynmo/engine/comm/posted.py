"""Collectives that are waited for when their result is read.

All ranks of a group post a broadcast and continue. On a receiving rank, :class:`PostedTensor` represents the value: a
tensor whose first reader waits until it has arrived. The other ranks only have to have posted the broadcast. So any
rank may read at any time, or not at all.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.torch_private import subclassed, tree_map, without_torch_function

_UNDER_WAY: set[Posted] = set()


class Posted:
    """A collective that this rank has posted.

    Args:
        tensor: nothing else may write to it until the result has arrived.
        wait: waits until the result has arrived or left.
        watched: in which this rank waits outside of the engine's operations
            (:meth:`ds_dynmo.engine.comm.watch.Watch.waiting`).
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        wait: Callable[[], object],
        watched: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.tensor = tensor
        self._wait: Callable[[], object] | None = wait
        self._watched = watched
        self._one_at_a_time = Lock()
        _UNDER_WAY.add(self)

    def wait(self) -> None:
        """Wait until the result has arrived or left; return at once if it has.

        Raises:
            RuntimeError: another rank is gone.
        """
        with self._one_at_a_time:  # another thread may wait too
            if self._wait is not None:
                _UNDER_WAY.discard(self)
                self._wait()
                self._wait, self._watched = None, nullcontext

    def read(self) -> None:
        """Wait like :meth:`wait` in code of the user, or at the end of the process, and notice if a rank is lost.

        Raises:
            RankLostError: one is.
        """
        with self._watched():
            self.wait()


class PostedReduction(Posted):
    """A reduction over the world.

    Attributes:
        number: of the collective (:class:`ds_dynmo.engine.comm.watch.Watch`).
        timeout: that it waits for the other ranks.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        wait: Callable[[], object],
        watched: Callable[[], AbstractContextManager[None]],
        number: int,
        timeout: timedelta,
    ) -> None:
        super().__init__(tensor, wait, watched)
        self.number, self.timeout = number, timeout


class PostedBroadcast(Posted):
    """A broadcast from rank ``src``. Construction is collective."""

    def __init__(
        self,
        tensor: torch.Tensor,
        src: int,
        group: Any,
        watched: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if dist.get_rank() != src:
            tensor.fill_(torch.nan)  # so that a read without a wait is noticed
        super().__init__(tensor, dist.broadcast(tensor, src, group=group, async_op=True).wait, watched)

    def element(self, index: int) -> PostedTensor:
        """Return a tensor for one element of the value."""
        return PostedTensor(self.tensor[index], self.read)


def wait_for_posted() -> None:
    """Wait for all that this process has posted, so that it does not end before others have received them."""
    for posted in tuple(_UNDER_WAY):
        with suppress(RuntimeError):
            posted.read()


atexit.register(wait_for_posted)


def forget_posted() -> None:
    """Wait for nothing at the end: a rank is lost, and the others end, too."""
    _UNDER_WAY.clear()


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
    return value._value
