"""Collectives over a tree of ranks: values go up to the first rank, and results come down.

The tree is binomial. Of eight ranks:

    0 ── 1
    ├─── 2 ── 3
    └─── 4 ── 5
         └─── 6 ── 7

A rank exchanges messages with its parent and its children only: at most log2 of the ranks, and two on average. The
ranks below one are a run of ranks that follows it, so gathered values are in the order of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch

from ds_dynmo.engine.comm.bounded import CallThread
from ds_dynmo.engine.comm.host_links import HostLinks

Combine = Callable[[torch.Tensor, torch.Tensor], Any]  # adds the second to the first, in place

# Tags of the main thread's messages, and of those that it does not wait for, which threads of two trees may send.
MAIN, POSTED, POSTED_IN_PIPELINE = 0, 1, 2


def maximum(numbers: torch.Tensor, others: torch.Tensor) -> None:
    """Take the elementwise maximum in place."""
    torch.maximum(numbers, others, out=numbers)


def parent_of(place: int) -> int | None:
    """Return the place above, None at the top.

    >>> [parent_of(place) for place in range(8)]
    [None, 0, 0, 2, 0, 4, 4, 6]
    """
    return place & (place - 1) if place else None


def children_of(place: int, size: int) -> list[int]:
    """List the places below, the nearest first: it has the fewest below it.

    >>> [children_of(place, 8) for place in (0, 2, 4, 5)]
    [[1, 2, 4], [3], [5, 6], []]
    """
    end = place & -place if place else size
    steps = [1 << bit for bit in range(size.bit_length()) if 1 << bit < end]
    return [place + step for step in steps if place + step < size]


def branch_of(place: int, size: int) -> range:
    """Return a place and all places below it.

    >>> branch_of(4, 7), branch_of(0, 7)
    (range(4, 7), range(0, 7))
    """
    return range(place, min(size, place + (place & -place))) if place else range(size)


class Tree:
    """One rank's part of the collectives over ``ranks``. All of them call the same methods in the same order.

    Methods raise RuntimeError if a rank is gone, or does not come within their time-out.

    Args:
        ranks: this rank among them; the first is the top of the tree.
        posted: tag of its messages that the main thread does not wait for.
    """

    def __init__(self, links: HostLinks, ranks: Sequence[int], rank: int, *, posted: int = POSTED) -> None:
        place, size = ranks.index(rank), len(ranks)
        above = parent_of(place)
        self._links, self._posted = links, posted
        self.size, self._is_first = size, place == 0
        self.parent = None if above is None else ranks[above]
        self.children = [ranks[child] for child in children_of(place, size)]
        self._branches = [branch_of(child, size) for child in children_of(place, size)]
        self._branch = branch_of(place, size)
        self._thread: CallThread | None = None

    # -- numbers --------------------------------------------------------------------------------------

    def reduce(self, numbers: torch.Tensor, combine: Combine, timeout: timedelta) -> torch.Tensor:
        """Combine a CPU tensor of every rank, in place."""
        _Reduction(self, self._links, numbers, combine, timeout, MAIN, to_all=True).run()
        return numbers

    def post_reduce(self, numbers: torch.Tensor, combine: Combine, timeout: timedelta) -> Callable[[], Any]:
        """Begin to combine a CPU tensor of every rank, in place; return a function that waits for the result.

        It waits for ranks that have not posted theirs, whether the others read or not.
        """
        reduction = _Reduction(self, self._links, numbers, combine, timeout, self._posted, to_all=True)
        if self.children:
            return self._in_thread(reduction.run)
        reduction.up()
        return reduction.down

    def post_reduce_to_first(self, numbers: torch.Tensor, combine: Combine, timeout: timedelta) -> Callable[[], Any]:
        """Begin to combine a CPU tensor of every rank, in place, on the first rank; return a function that waits.

        On the first rank it waits for the others, on these until theirs is sent.
        """
        reduction = _Reduction(self, self._links, numbers, combine, timeout, self._posted, to_all=False)
        if self._is_first:
            return reduction.run
        if self.children:
            return self._in_thread(reduction.run)
        reduction.up()
        return reduction.down

    def _in_thread(self, call: Callable[[], None]) -> Callable[[], None]:
        """Run calls one after the other beside the main thread: other ranks wait for what this one combines."""
        self._thread = self._thread or CallThread("ds_dynmo reductions")
        called: Future[None] = self._thread.post(call)
        return called.result

    # -- bytes ----------------------------------------------------------------------------------------

    def gather(self, data: bytes, timeout: timedelta) -> list[bytes]:
        """Gather a byte string of every rank on the first, in the order of ranks; others get an empty list."""
        left = _time_left(timeout)
        sizes = torch.zeros(len(self._branch), dtype=torch.int64, device="cpu")
        sizes[0] = len(data)
        starts = [branch.start - self._branch.start for branch in self._branches]
        below = [sizes[start : start + len(branch)] for start, branch in zip(starts, self._branches)]
        self._wait([self._links.receive(part, child) for part, child in zip(below, self.children)], left)
        whole = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
        whole[: len(data)] = _tensor_of(data)
        theirs = whole[len(data) :].split([int(part.sum()) for part in below])
        self._wait([self._links.receive(t, child) for t, child in zip(theirs, self.children) if t.numel()], left)
        if self.parent is not None:
            sends = [self._links.send(tensor, self.parent) for tensor in (sizes, whole) if tensor.numel()]
            self._wait(sends, left)
        return _split(whole, sizes) if self._is_first else []

    def broadcast(self, parts: Sequence[bytes], count: int, timeout: timedelta) -> list[bytes]:
        """Send ``count`` byte strings of the first rank to all; the ``parts`` of others are ignored."""
        left = _time_left(timeout)
        sizes = torch.tensor([len(part) for part in parts] if self._is_first else [0] * count, device="cpu")
        self._down(sizes, left)
        data = b"".join(parts) if self._is_first else bytes(int(sizes.sum()))
        whole = _tensor_of(data)
        if data:
            self._down(whole, left)
        return _split(whole, sizes)

    def _down(self, tensor: torch.Tensor, left: Callable[[], timedelta]) -> None:
        if self.parent is not None:
            self._wait([self._links.receive(tensor, self.parent)], left)
        self._wait([self._links.send(tensor, child) for child in reversed(self.children)], left)

    @staticmethod
    def _wait(works: Sequence[Any], left: Callable[[], timedelta]) -> None:
        for work in works:
            work.wait(left())


class _Reduction:
    """One reduction that is under way: its receives are posted.

    Args:
        numbers: of this rank; then of its branch, and at last the result.
        to_all: whether the result comes down.
    """

    def __init__(
        self,
        tree: Tree,
        links: HostLinks,
        numbers: torch.Tensor,
        combine: Combine,
        timeout: timedelta,
        tag: int,
        *,
        to_all: bool,
    ) -> None:
        self._tree, self._links, self._tag = tree, links, tag
        self._numbers, self._combine, self._left = numbers, combine, _time_left(timeout)
        theirs = [torch.empty_like(numbers) for _ in tree.children]
        self._arriving = [(links.receive(t, child, tag), t) for t, child in zip(theirs, tree.children)]
        self._result: torch.Tensor | None = None
        self._coming: Any = None
        if to_all and tree.parent is not None:
            self._result = torch.empty_like(numbers)
            self._coming = links.receive(self._result, tree.parent, tag)
        self._sent: Any = None
        self._to_all = to_all

    def run(self) -> None:
        """Wait for the result, or until this rank's part is done."""
        self.up()
        self.down()

    def up(self) -> None:
        """Combine the numbers of the ranks below, and begin to send the result."""
        for work, theirs in self._arriving:
            work.wait(self._left())
            self._combine(self._numbers, theirs)
        if self._tree.parent is not None:
            self._sent = self._links.send(self._numbers, self._tree.parent, self._tag)

    def down(self) -> None:
        """Wait for the result, and pass it on."""
        if self._coming is not None:
            self._coming.wait(self._left())
        if self._sent is not None:
            self._sent.wait(self._left())
        if self._result is not None:
            self._numbers.copy_(self._result)
        if self._to_all:
            works = [self._links.send(self._numbers, child, self._tag) for child in reversed(self._tree.children)]
            for work in works:
                work.wait(self._left())


def _time_left(timeout: timedelta) -> Callable[[], timedelta]:
    """Return a function that returns what is left of ``timeout``, which begins now."""
    end = time.monotonic() + timeout.total_seconds()
    return lambda: timedelta(seconds=max(end - time.monotonic(), 0.001))  # 0 means forever


def _tensor_of(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _split(whole: torch.Tensor, sizes: torch.Tensor) -> list[bytes]:
    return [part.numpy().tobytes() for part in whole.split(sizes.tolist())]
