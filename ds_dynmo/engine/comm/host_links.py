"""Messages on the CPU between any two ranks, which connect when they exchange their first one.

A process group of gloo connects each rank with every other. These links belong to none: a rank has sockets for the
ranks that it exchanges messages with, and forming them waits for nobody. But two ranks connect only when both use their
link: of a pair the one that comes first waits, even to begin a message (seen in torch 2.13.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.torch_private import lazy_gloo

PeerTensor = tuple[int, torch.Tensor]  # a tensor and the rank it goes to or comes from

_CONNECT = 1 << 20  # tag of the messages that connect


class HostLinks:
    """One rank's messages to others. Those between two ranks with one ``tag`` arrive in the order of sending.

    Once an operation of a rank has timed out, gloo closes all links of that rank.

    Args:
        store: a part of the launch's that no other links have used; ranks find each other's addresses there.
        timeout: that operations wait if they are told no other.
    """

    def __init__(self, store: BoundedStore, timeout: timedelta) -> None:
        self._addresses = _Addresses(store)  # gloo calls its methods, and does not hold it
        self._gloo = lazy_gloo(self._addresses, dist.get_rank(), dist.get_world_size(), timeout)
        self._timeout, self._connected = timeout, {dist.get_rank()}

    def connect(self, ranks: Iterable[int]) -> None:
        """Connect with ranks that connect with this one meanwhile, so that beginning a message waits for nobody.

        All go through their pairs in one order of all pairs, so no ranks wait for each other in a circle.
        """
        here = dist.get_rank()
        for rank in sorted({*ranks} - self._connected, key=lambda rank: (min(here, rank), max(here, rank))):
            mine, theirs = torch.zeros(2, 1, device="cpu")
            for work in (self.receive(theirs, rank, _CONNECT), self.send(mine, rank, _CONNECT)):
                work.wait(self._timeout)
            self._connected.add(rank)

    def send(self, tensor: torch.Tensor, rank: int, tag: int = 0) -> Any:
        """Begin to send a contiguous tensor, which must not change until the work that is returned is done."""
        return self._gloo.send([tensor], rank, tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int = 0) -> Any:
        """Begin to receive into a contiguous tensor of the size that ``rank`` sends."""
        return self._gloo.recv([tensor], rank, tag)

    def post(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]) -> list[Any]:
        """Begin several operations."""
        works = [self.receive(tensor, rank) for rank, tensor in receives]
        return works + [self.send(tensor, rank) for rank, tensor in sends]


class _Addresses(dist.Store):
    """Tells gloo the addresses of ranks from the launch's store, within a bounded time."""

    def __init__(self, store: BoundedStore) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        """Write this rank's address."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Read another rank's address."""
        return self._store.get(key)

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        """Wait until another rank has written its address."""
        self._store.wait(keys, timeout)
